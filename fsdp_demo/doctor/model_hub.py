"""Whether the hub of models can be asked, before somebody tries for half a minute."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def reachable(seconds: float = 3.0) -> bool:
    """Whether the hub at HF_ENDPOINT takes a connection within `seconds`; taken for granted behind
    a proxy, and refused by HF_HUB_OFFLINE. Without it only what is cached can be loaded.
    """
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return False
    if any(os.environ.get(name) for name in PROXIES):
        return True
    place = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((place.hostname or "", place.port or 443), seconds).close()
    except OSError:
        return False
    return True
