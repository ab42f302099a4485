"""One run: its start, the order of a step, messages under way, its end, and what it will send."""
