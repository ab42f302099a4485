"""`python -m fsdp_demo.launch`: see `run.py`."""

from __future__ import annotations

import sys

from .run import main

if __name__ == "__main__":
    sys.exit(main())
