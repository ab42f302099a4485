"""Keys of CURVE from the token of a run (ISLAND_TOKEN).

All ranks derive the same pair from the token. The side that listens proves by the secret half who
it is; the public half is never sent, so that who knows it has the token. The other side takes a
fresh pair each time. A token is stretched (scrypt), so that guesses are dear; it should be random
all the same, such as `openssl rand -hex 32`.
"""

from __future__ import annotations

import hashlib
from typing import Any

SHORTEST = 16  # characters of a token


class Keys:
    """Keys of a run.

    Attributes:
        mark: what the islands compare before they connect, so that different tokens are told apart
            at once. It says nothing of the keys.
    """

    def __init__(self, token: str, run: str):
        import zmq
        from zmq.utils import z85

        check(token)
        made = hashlib.scrypt(
            token.encode(), salt=f"fsdp_demo line {run}".encode(), n=1 << 14, r=8, p=1, dklen=40
        )
        self._zmq, self._secret, self.mark = zmq, z85.encode(made[:32]), made[32:].hex()
        self._public = zmq.curve_public(self._secret)

    def listen(self, socket: Any) -> None:
        """Let a socket accept only who has the token. Before it is bound."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.curve_publickey = self._public

    def connect(self, socket: Any) -> None:
        """Let a socket connect only to who has the token. Before it connects."""
        socket.curve_serverkey = self._public
        socket.curve_publickey, socket.curve_secretkey = self._zmq.curve_keypair()


def check(token: str) -> str:
    """The token.

    Raises:
        ValueError: it is short.
    """
    if len(token) < SHORTEST:
        raise ValueError(
            f"ISLAND_TOKEN has {len(token)} characters, allowed are {SHORTEST} or more: take "
            "`openssl rand -hex 32`"
        )
    return token
