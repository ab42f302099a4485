"""What tests and benchmarks of memory share: `Ledger` follows every tensor that operations make
until it is freed, `Echo` stands for other replicas, which send back what they are sent.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_demo.elastic import chunks
from fsdp_demo.elastic.message_state import RoundMessage
from fsdp_demo.elastic.peer_group import PeerGroup
from fsdp_demo.membership.protocol_types import Member, Piece, Settlement, What
from fsdp_demo.peers.header import Sealed
from fsdp_demo.rendezvous.topology import Topology


class Ledger(TorchDispatchMode):
    """Follows the storages that operations make inside `with`, until they are freed, wherever that
    happens.

    Exact for tensors; what a kernel takes and frees within one operation is not seen. Two accounts:
    "device" is what the main thread makes, "host" what the exchange's thread makes, which is on the
    host also where the shards are on an accelerator.

    Attributes:
        now, most: bytes held, and the most since `reset`, per account.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, tuple[str, int]] = {}
        self._lock = threading.RLock()
        self.now = {"device": 0, "host": 0}
        self.reset()

    def reset(self) -> None:
        self.most = dict(self.now)

    def inner(self) -> Ledger:
        """A mode for another thread that writes into this ledger."""
        mode = Ledger()
        mode._sizes, mode._lock, mode.now, mode.most = self._sizes, self._lock, self.now, self.most
        return mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # a DTensor: see its local operations
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        made = [s for t in tensors_of(out) if (s := t.untyped_storage())._cdata not in self._sizes]
        # most operations make views
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))} if made else ()
        for storage in made:
            if storage._cdata not in given:
                self._note(storage)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch's guard against it takes as long as the rest."""
        return False

    def _note(self, storage: Any) -> None:
        account = "device" if threading.current_thread() is threading.main_thread() else "host"
        with self._lock:
            if storage._cdata in self._sizes:
                return
            self._sizes[storage._cdata] = account, storage.nbytes()
            self.now[account] += storage.nbytes()
            self.most[account] = max(self.most[account], self.now[account])
            weakref.finalize(storage, self._freed, storage._cdata)

    def _freed(self, key: int) -> None:
        with self._lock:
            account, size = self._sizes.pop(key)
            self.now[account] -= size


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in lists, tuples and dicts: an operation has no others, and torch's own walk
    takes ten times as long.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [t for part in value for t in tensors_of(part)]


class Echo(Topology):
    """Other replicas that send back what they are sent: they hold the same."""

    def join(self, position: Any) -> tuple[EchoPeers, int]:
        return EchoPeers(self.islands), position.num_copies


class EchoPeers(PeerGroup):
    """Makes room for what would come, as `elastic/chunks.py` does, and fills it from what is
    sent."""

    def __init__(self, size: int):
        super().__init__(Member(0), {0: "island0"}, range(size), 60.0)

    def _taken_part(self, message: RoundMessage) -> Settlement:
        self._next += 1
        members = tuple(map(Member, self.slots))
        settled = Settlement(message.n, members, 0)
        pieces = [("body", m) for m in members[1:]]
        if message.vectors:
            pieces += [(what, m) for what in ("share", "part") for m in members[1:]]
        firsts = [torch.empty(chunks.LARGEST, dtype=torch.uint8) for _ in pieces]

        def came(what: What, of: Member, sent: Sealed) -> None:
            piece = Piece(what, of, 0)
            room = message.room(piece, members, sent.body.numel())
            message.keep(piece, Sealed(sent.head, room.copy_(sent.body)), message.header)
            firsts.pop()

        for m in members[1:]:
            came("body", m, message.bodies[self._me])
        if message.vectors:
            for m, sent in message.cut(members).items():
                came("share", m, sent)
            mean = message.average(settled)
            for m in members[1:]:
                came("part", m, mean)
        return settled
