"""The page and the pictures that `fsdp-demo report` makes of the files of runs (`runlog`).

The page needs jinja2, which torch brings, its pictures matplotlib (extra `report`).
"""

from .page import make

__all__ = ["make"]
