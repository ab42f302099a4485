"""The log of a run while it trains: files in its output folder, a line of progress, and metrics by
name.

Imports no torch. `tools.report` makes a page of the files.
"""

from ..errors import size
from .files import spared, write_json
from .progress import ProgressLine
from .record import RunRecord, ledger_rows, summarise, tracked
from .words import table

__all__ = ["ProgressLine", "RunRecord", "ledger_rows", "size", "spared", "summarise", "table"]
__all__ += ["tracked", "write_json"]
