"""The page and the pictures that `fsdp-demo report` makes of the files of runs (`runlog`).

The page needs nothing but the standard library, its pictures matplotlib (extra `report`).
"""

from .page import make

__all__ = ["make"]
