"""What a run tells while it trains: files in its output folder, a line of progress, and metrics by
name.

Imports no torch. `tools.report` makes a page of the files.
"""

from .progress import ProgressLine
from .record import RunRecord, ledger_rows, tracked
from .words import size, table

__all__ = ["ProgressLine", "RunRecord", "ledger_rows", "size", "table", "tracked"]
