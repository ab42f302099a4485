"""One run: its start, the order of a step, messages under way, its end, and what it will send.

May import `channels`, `hosts`, `comm`, `compression`, `config`.
"""
