"""`fsdp-demo export RUN OUT`: what a run has trained, as a folder for `from_pretrained`.

May import what `fsdp_demo.integrations` may.
"""

from __future__ import annotations

from .pretrained import export

__all__ = ["export"]
