"""What an error says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(call: Callable[[], Any], *parts: str, kind: type[BaseException] = ValueError) -> str:
    """The text of the error that `call()` raises; it holds all `parts`."""
    with pytest.raises(kind) as error:
        call()
    text = str(error.value)
    for part in parts:
        assert part in text, f"{part!r} is not in {text}"
    return text
