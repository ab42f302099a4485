"""The tensors of one numbered message on one rank (pieces to send, pieces received, parts of the
mean), kept until all members have the message.

The membership machine (`membership/machine.py`) says which pieces count; the calculations are here.
They run in the thread that exchanges (`peer_group.py`), which waits for the message meanwhile; the
network thread only moves bytes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import WireError
from ..membership.protocol_types import Kind, Member, Piece, Settlement
from ..peers import collectives
from ..peers.collectives import new_vector
from ..peers.header import EARLY, MEANS, PARTS, PAYLOAD, RESET, Header, Sealed

Task = Callable[[], None]
Vectors = Sequence[tuple[Tensor, str]]
Weigh = Callable[[Sequence[Header]], Sequence[Sequence[float]]]


class EarlyMessage:
    """The contribution to message n that an island sends before it leaves: header, body, then its
    vectors coded uncut. A rank may receive it before it has launched the message itself.

    Args:
        kind: of the message, in the view of the leaving island. longest: bytes of body and vectors
            at most.

    Attributes:
        data, header: None until the contribution is here.
    """

    def __init__(self, n: int, kind: Kind, longest: int):
        self.n, self.kind, self.longest, self.num_connections = n, kind, longest, 1
        self.data: Sealed | None = None
        self.header: Header | None = None

    @classmethod
    def of(cls, n: int, header: Header, body: Tensor, vectors: Vectors) -> EarlyMessage:
        """The contribution of this island. body: uint8; vectors: as for `RoundMessage`."""
        coded = collectives.share(vectors, 1, 0) if vectors else body[:0]
        early = cls(n, "mixed" if vectors else "gather", body.numel() + coded.numel())
        early.header = replace(header, number=n % 2**32, flags=header.flags | EARLY)
        early.data = Sealed.of(early.header, torch.cat([body, coded]))
        return early

    def room(self, piece: Piece, owners: Sequence[Member], size: int) -> Tensor:
        """Memory for the body of a piece: uint8 [size]."""
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def limit(self, what: str, of: Member, owners: Sequence[Member]) -> int:
        """The most bytes of the body of a piece: of body and vectors together."""
        return self.longest

    def expected(self, what: str, claimed: Header) -> Header:
        """The claimed header under this number; step and kind are compared at the launch here."""
        return replace(claimed, number=self.n % 2**32)


class RoundMessage:
    """One numbered message on one rank.

    Args:
        n: its number. me: this island. header: sent with it.
        body: uint8; the others' have the same length, unless `longest` is given: bytes at most.
        vectors, weigh, compare: see `PeerGroup.exchange`.
        new_vector: makes room for the mean of the only vector, fp32 [n].
        num_connections: connections to which its pieces are dealt.
        among: its members, where they are not all (`protocol_events.Launched`).

    Attributes:
        kind: for the membership machine: gather without vectors, else mixed.
        tasks: for the thread that waits: a calculation, the settlement when the message is
            complete, or an error to raise.
        bodies, headers: by contributor. shares, parts: by owner and attempt. early: contributions
            of islands that leave, by island.
        making: parts of the mean under calculation, with the view in which they are to be sent,
            and the receivers.
        damage: found first in a piece of it, or in what a peer has sent beside it.
        sent, received: bytes so far, headers counted. alike, something: of a message to compare,
            see `PeerGroup`.
    """

    def __init__(
        self,
        n: int,
        me: Member,
        header: Header,
        body: Tensor,
        vectors: Vectors = (),
        weigh: Weigh = lambda headers: [],
        longest: int | None = None,
        num_connections: int = 1,
        compare: bool = False,
        new_vector: Callable[[int], Tensor] = new_vector,
        among: tuple[Member, ...] = (),
    ):
        self.among = among
        self.n, self.me, self.num_connections, self.longest = n, me, num_connections, longest
        self.header = replace(header, number=n % 2**32)
        self.kind: Kind = "mixed" if vectors else "gather"
        self.vectors, self.weigh = list(vectors), weigh
        self.spans = [(v.numel(), code) for v, code in self.vectors]
        self.tasks: queue.SimpleQueue[Task | Settlement | BaseException] = queue.SimpleQueue()
        self.bodies: dict[Member, Sealed] = {me: Sealed.of(self.header, body)}
        self.headers: dict[Member, Header] = {me: self.header}
        self.shares: dict[tuple[Member, int], Sealed] = {}
        self.parts: dict[tuple[Member, int], Sealed] = {}
        self._new_vector, self._means = new_vector, dict[int, Tensor]()
        self.early: dict[Member, EarlyMessage] = {}
        self.making: dict[Piece, tuple[int, tuple[Member, ...]]] = {}
        self.damage: WireError | None = None
        self.sent = self.received = 0
        self.weighed = self.alike = self.something = False
        self._compare = compare

    def held(self, piece: Piece) -> Sealed | None:
        """A body or part that is here."""
        return (
            self.bodies.get(piece.of)
            if piece.what == "body"
            else self.parts.get((piece.of, piece.attempt))
        )

    def expected(self, what: str, claimed: Header | None = None) -> Header:
        """The header that should come with a piece, but for the fields in which senders differ."""
        if claimed is not None and self.header.kind == RESET == claimed.kind:
            return replace(self.header, step=claimed.step)  # `Exchange.reset` compares steps
        legs = {"share": PARTS, "part": MEANS} if self.header.kind == PAYLOAD else {}
        return replace(self.header, kind=legs.get(what, self.header.kind))

    def limit(self, what: str, of: Member, owners: Sequence[Member]) -> int:
        """Bytes of a piece without its header: exact, or the most where bodies may differ."""
        if what == "body":
            return self.longest or self._body
        there, back = collectives.legs(self.spans, len(owners))
        leg = there[owners.index(self.me)] if what == "share" else back[owners.index(of)]
        return collectives.coding.total_bytes(leg)

    def room(self, piece: Piece, owners: Sequence[Member], size: int) -> Tensor:
        """Where the body of a piece is to lie: uint8 [size]."""
        # the first of the shares lies where their mean will be
        first = piece.what == "share" and piece.of == next(m for m in owners if m != self.me)
        if not (first or piece.what == "part") or not self._in_place:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        at = collectives.coding.cuts(self.spans[0][0], "fp32", len(owners))
        j = owners.index(self.me if first else piece.of)
        return self._mean(piece.attempt)[at[j] : at[j + 1]].view(torch.uint8)

    @property
    def _in_place(self) -> bool:
        """Whether parts of the mean are received and made directly in the mean: for fp32 values of
        a payload, since no caller changes its mean while parts of it may still be forwarded.
        """
        return self.header.kind == PAYLOAD and [code for _, code in self.spans] == ["fp32"]

    def _mean(self, attempt: int) -> Tensor:
        """Room for the mean of the only vector, fp32 [n]. Two threads ask for it."""
        if (found := self._means.get(attempt)) is None:
            found = self._means.setdefault(attempt, self._new_vector(self.spans[0][0]))
        return found

    def keep(self, piece: Piece, data: Sealed, header: Header) -> None:
        """Keep a piece that has come, whole and checked."""
        if piece.what == "body":
            self.bodies[piece.of], self.headers[piece.of] = data, header
        elif piece.what == "share":
            self.shares[piece.of, piece.attempt] = data
            self.headers.setdefault(piece.of, header)
        else:
            self.parts[piece.of, piece.attempt] = data

    # ---- calculations, in the thread that waits ------------------------------------------------

    def cut(self, owners: Sequence[Member]) -> dict[Member, Sealed]:
        """Each other owner's share of the vectors, coded."""
        size, header = len(owners), self.expected("share")
        return {
            m: Sealed.of(header, collectives.share(self.vectors, size, j))
            for j, m in enumerate(owners)
            if m != self.me
        }

    def average(self, settled: Settlement) -> Sealed:
        """The coded mean of the part that this rank owns, from all shares, which are used up, and
        from what came early.
        """
        who, owners, attempt = self.counted(settled), settled.owners, settled.attempt
        weights = self.weigh([self._header(m, settled) for m in who])
        self.weighed = True
        mine, size = owners.index(self.me), len(owners)

        def share(m: Member) -> Any:
            if m == self.me:  # it is not sent: it is coded only where bytes are compared
                if not self._compare:
                    return collectives.own_part(self.vectors, size, mine)
                return collectives.share(self.vectors, size, mine)
            if m in owners:
                return self.shares.pop((m, attempt)).body
            return collectives.stretch(self._came_early(m)[self._body :], self.spans, mine, size)

        bodies = [share(m) for m in who]
        if self._compare:
            whole = [body for m, body in zip(who, bodies, strict=True) if m in owners]
            self.alike = all(torch.equal(body, whole[0]) for body in whole)
            self.something = bool(whole[0].any())
        piece, length = Piece("part", self.me, attempt), self.limit("part", self.me, owners)
        part = self.room(piece, owners, length)
        collectives.part_of_mean(bodies, self.spans, weights, mine, size, part)
        self.parts[self.me, attempt] = made = Sealed.of(self.expected("part"), part)
        return made

    def coded(self, settled: Settlement) -> list[Tensor]:
        """The coded parts of the means, without headers, in the order of their owners. None without
        vectors, nor where an island that has left contributed: parts are fewer than headers then.
        """
        if not self.vectors or settled.early:
            return []
        return [self.parts[m, settled.attempt].body for m in settled.owners]

    def result(self, settled: Settlement) -> tuple[list[Header], list[Tensor], list[Tensor]]:
        """Headers and bodies of the contributors, and the means of the vectors."""
        who, means = self.counted(settled), list[Tensor]()
        headers = [self._header(m, settled) for m in who]
        if not self.weighed:
            self.weigh(headers)
        if self._in_place:
            means = [self._mean(settled.attempt)]
        elif self.vectors:
            parts = [self.parts[m, settled.attempt].body for m in settled.owners]
            means = collectives.whole(parts, self.spans)
        bodies = [
            self._came_early(m)[: self._body] if m in settled.early else self.bodies[m].body
            for m in who
        ]
        return headers, bodies, means

    # ---- what came early -----------------------------------------------------------------------

    def counted(self, settled: Settlement) -> tuple[Member, ...]:
        """The contributors without those whose early contribution was for another message (a
        question came in between, say). All ranks compare the same bytes, so all agree.
        """
        return tuple(
            m for m in settled.contributors if m not in settled.early or self._fits(self.early[m])
        )

    def _fits(self, early: EarlyMessage) -> bool:
        mine, theirs = self.header, early.header
        assert theirs is not None and early.data is not None
        size = self._body + collectives.coding.total_bytes(self.spans)
        same = (theirs.digest, theirs.kind, theirs.step) == (mine.digest, mine.kind, mine.step)
        return same and self.longest is None and early.data.body.numel() == size

    @property
    def _body(self) -> int:
        return self.bodies[self.me].body.numel()

    def _came_early(self, m: Member) -> Tensor:
        data = self.early[m].data
        assert data is not None
        return data.body

    def _header(self, m: Member, settled: Settlement) -> Header:
        header = self.early[m].header if m in settled.early else self.headers[m]
        assert header is not None
        return header
