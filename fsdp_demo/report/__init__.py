"""What a run tells: files in its output folder while it trains, a line of progress, and a report
made of these files.

May import torch-free parts of every package below it; drawing needs nothing but the standard
library, a png needs matplotlib (extra `report`).
"""

from .metrics import tracked
from .page import leave, make
from .progress import ProgressLine
from .record import RunRecord, ledger_rows
from .words import size, table

__all__ = [
    "ProgressLine",
    "RunRecord",
    "leave",
    "ledger_rows",
    "make",
    "size",
    "table",
    "tracked",
]
