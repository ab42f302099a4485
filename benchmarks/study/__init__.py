"""The study: methods side by side at equal tokens. `study.py` is the command; see README.md."""
