"""The bytes of one numbered message on one rank: what it sends, what has come, what it has made of
it. Kept until all members have it.

The membership machine (`membership.py`) says which pieces count; this file has the tensors, and the
calculations on them. Calculations run in the thread that exchanges (`elastic_peers.py`), which
waits for the message meanwhile; the network thread only moves bytes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import collectives
from .epochs import Kind, Member, Piece, Settlement
from .header import EARLY, HEADER, MEANS, PARTS, PAYLOAD, Header, fill
from .peers import Vectors, Weigh

Task = Callable[[], None]


@dataclass(frozen=True)
class Due:
    """The message is complete: as it is settled."""

    settled: Settlement


class Early:
    """What an island that leaves contributes to message n, ahead of its time: header, body, then
    its vectors coded uncut. A rank may have it before it has launched that message.

    Args:
        kind: as who leaves takes the message to be. longest: bytes of body and vectors at most.

    Attributes:
        data, header: when it is here; uint8 with the header before the rest.
    """

    def __init__(self, n: int, kind: Kind, longest: int):
        self.n, self.kind, self.longest, self.num_connections = n, kind, longest, 1
        self.data: Tensor | None = None
        self.header: Header | None = None

    @classmethod
    def of(cls, n: int, header: Header, body: Tensor, vectors: Vectors) -> Early:
        """What this island sends. body: uint8; vectors: as for `Message`."""
        coded = collectives.shares(vectors, 1)[0][HEADER.size :] if vectors else body[:0]
        early = cls(n, "mixed" if vectors else "gather", body.numel() + coded.numel())
        early.header = replace(header, number=n % 2**32, flags=header.flags | EARLY)
        data = torch.cat([torch.empty(HEADER.size, dtype=torch.uint8, device="cpu"), body, coded])
        early.data = fill(data, early.header)
        return early

    def limit(self, what: str, of: Member, owners: Sequence[Member]) -> int:
        """See `Message.limit`."""
        return self.longest

    def expected(self, claimed: Header) -> Header:
        """The header that should come: what it says of step and kind is compared when the message
        is launched here.
        """
        return replace(claimed, number=self.n % 2**32)


class Message:
    """One message.

    Args:
        n: its number. me: this island. header: what is said with it.
        body: uint8 with room for a header; the same length is expected from everybody, unless
            `longest` is given.
        vectors, weigh: see `PeerGroup.exchange`.
        longest: bytes of a body at most, where they differ.
        num_connections: connections to which its pieces are dealt. compare: see
            `PeerGroup.exchange`.

    Attributes:
        kind: for the membership machine: gather without vectors, else mixed.
        tasks: what the thread that waits is to do: a calculation, `Due`, or an error to raise.
        bodies, headers: of each contributor, with the header before the body. shares, parts: by
            whose they are, and attempt.
        early: what islands that leave have sent ahead of its time, by whose it is.
        making: parts of the mean that are being calculated, with the view in which they are to be
            sent, and to whom.
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
    ):
        self.n, self.me, self.num_connections, self.longest = n, me, num_connections, longest
        self.header = replace(header, number=n % 2**32)
        self.kind: Kind = "mixed" if vectors else "gather"
        self.vectors, self.weigh = list(vectors), weigh
        self.spans = [(v.numel(), code) for v, code in self.vectors]
        self.tasks: queue.SimpleQueue[Task | Due | BaseException] = queue.SimpleQueue()
        self.bodies: dict[Member, Tensor] = {me: fill(body, self.header)}
        self.headers: dict[Member, Header] = {me: self.header}
        self.shares: dict[tuple[Member, int], Tensor] = {}
        self.parts: dict[tuple[Member, int], Tensor] = {}
        self.early: dict[Member, Early] = {}
        self.making: dict[Piece, tuple[int, tuple[Member, ...]]] = {}
        self.sent = self.received = 0
        self.weighed = self.alike = self.something = False
        self._compare = compare

    def tensor(self, piece: Piece) -> Tensor | None:
        """The bytes of a body or part that is here, header and all."""
        return (
            self.bodies.get(piece.of)
            if piece.what == "body"
            else self.parts.get((piece.of, piece.attempt))
        )

    def expected(self, what: str) -> Header:
        """The header that should come with a piece, but for what each sender says of itself."""
        legs = {"share": PARTS, "part": MEANS} if self.header.kind == PAYLOAD else {}
        return replace(self.header, kind=legs.get(what, self.header.kind))

    def limit(self, what: str, of: Member, owners: Sequence[Member]) -> int:
        """Bytes of the body of a piece: exactly, but for bodies where they may differ."""
        if what == "body":
            return self.longest or self.bodies[self.me].numel() - HEADER.size
        there, back = collectives.legs(self.spans, len(owners))
        leg = there[owners.index(self.me)] if what == "share" else back[owners.index(of)]
        return collectives.coding.total_bytes(leg)

    def keep(self, piece: Piece, data: Tensor, header: Header) -> None:
        """A piece that has come, whole and checked."""
        if piece.what == "body":
            self.bodies[piece.of], self.headers[piece.of] = data, header
        elif piece.what == "share":
            self.shares[piece.of, piece.attempt] = data
            self.headers.setdefault(piece.of, header)
        else:
            self.parts[piece.of, piece.attempt] = data

    # ---- calculations, in the thread that waits ------------------------------------------------

    def cut(self, owners: Sequence[Member]) -> dict[Member, Tensor]:
        """Each other owner's share of the vectors, coded."""
        made = collectives.shares(self.vectors, len(owners), but=owners.index(self.me))
        return {
            m: fill(share, self.expected("share"))
            for m, share in zip(owners, made, strict=True)
            if m != self.me
        }

    def average(self, settled: Settlement) -> Tensor:
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
                return collectives.share(self.vectors, size, mine)[HEADER.size :]
            if m in owners:
                return self.shares.pop((m, attempt))[HEADER.size :]
            return collectives.stretch(self._came_early(m)[self._body :], self.spans, mine, size)

        bodies = [share(m) for m in who]
        if self._compare:
            whole = [body for m, body in zip(who, bodies, strict=True) if m in owners]
            self.alike = all(torch.equal(body, whole[0]) for body in whole)
            self.something = bool(whole[0].any())
        part = collectives.part_of_mean(bodies, self.spans, weights, mine, size)
        self.parts[self.me, attempt] = fill(part, self.expected("part"))
        return self.parts[self.me, attempt]

    def coded(self, due: Due) -> list[Tensor]:
        """The coded parts of the means, without headers, by whose they are; nothing without
        vectors, and where somebody who has left has a share in them: parts are not as many as
        headers then."""
        settled = due.settled
        if not self.vectors or settled.early:
            return []
        return [self.parts[m, settled.attempt][HEADER.size :] for m in settled.owners]

    def result(self, due: Due) -> tuple[list[Header], list[Tensor], list[Tensor]]:
        """Headers and bodies of the contributors, and the means of the vectors."""
        settled, means = due.settled, list[Tensor]()
        who = self.counted(settled)
        headers = [self._header(m, settled) for m in who]
        if not self.weighed:
            self.weigh(headers)
        if self.vectors:
            means = collectives.whole(
                [self.parts[m, settled.attempt][HEADER.size :] for m in settled.owners], self.spans
            )
        bodies = [
            self._came_early(m)[: self._body]
            if m in settled.early
            else self.bodies[m][HEADER.size :]
            for m in who
        ]
        return headers, bodies, means

    # ---- what came early -----------------------------------------------------------------------

    def counted(self, settled: Settlement) -> tuple[Member, ...]:
        """The contributors, but for what came early and is of something else: a question came in
        between, say. All compare the same bytes with the same message, so all come to the same."""
        return tuple(
            m for m in settled.contributors if m not in settled.early or self._fits(self.early[m])
        )

    def _fits(self, early: Early) -> bool:
        mine, theirs = self.header, early.header
        assert theirs is not None and early.data is not None
        size = self._body + collectives.coding.total_bytes(self.spans)
        same = (theirs.digest, theirs.kind, theirs.step) == (mine.digest, mine.kind, mine.step)
        return same and self.longest is None and early.data.numel() == HEADER.size + size

    @property
    def _body(self) -> int:
        return self.bodies[self.me].numel() - HEADER.size

    def _came_early(self, m: Member) -> Tensor:
        data = self.early[m].data
        assert data is not None
        return data[HEADER.size :]

    def _header(self, m: Member, settled: Settlement) -> Header:
        header = self.early[m].header if m in settled.early else self.headers[m]
        assert header is not None
        return header
