"""What a run tells: files in its output folder while it trains, a line of progress, and a report
made of these files.

May import torch-free parts of every package below it; drawing needs nothing but the standard
library, a png needs matplotlib (extra `report`).
"""
