"""One channel at work on one rank: its state, what it sends, how what arrives is decoded and
applied.
"""
