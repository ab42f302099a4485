"""The log of a run while it trains: files in its output folder, a line of progress, and metrics by
name.

Imports no torch. `tools.report` makes a page of the files.
"""
