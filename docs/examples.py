"""For mkdocstrings: docstrings of this package say `Example:`, griffe knows code under `Examples:`
only.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Gives the section the name under which its lines are shown as code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for every object that was read from the sources."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
