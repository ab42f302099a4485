"""The bytes of one numbered message on one rank: what it sends, what has come, what it has made of it. Kept until all members have it.

The membership machine (`membership.py`) says which pieces count; this file has the tensors, and the calculations on them. Calculations run
in the thread that exchanges (`member_line.py`), which waits for the message meanwhile; the driver's thread only moves bytes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from . import collectives
from .epochs import Kind, Member, Piece
from .header import ENDING, HEADER, MEANS, PARTS, PAYLOAD, Header, fill
from .peers import Vectors, Weigh

Task = Callable[[], None]


@dataclass(frozen=True)
class Due:
    """The message is complete: whose contributions count, and the attempt whose parts make its mean."""

    contributors: tuple[Member, ...]
    attempt: int


class Message:
    """One message.

    Args:
        n: its number. me: this island. header: what is said with it.
        body: uint8 with room for a header; the same length is expected from everybody, unless `longest` is given.
        vectors, weigh: see `Line.exchange`.
        longest: bytes of a body at most, where they differ.
        lanes: connections to which its pieces are dealt.

    Attributes:
        kind: for the membership machine: gather without vectors, else mixed.
        tasks: what the thread that waits is to do: a calculation, `Due`, or an error to raise.
        bodies, headers: of each contributor, with the header before the body. shares, parts: by whose they are, and attempt.
        making: parts of the mean that are being calculated, with the view in which they are to be sent, and to whom.
        sent, received: bytes so far, headers counted.
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
        lanes: int = 1,
    ):
        self.n, self.me, self.lanes, self.longest = n, me, lanes, longest
        self.header = replace(header, number=n % 2**32)
        self.kind: Kind = "mixed" if vectors else "gather"
        self.vectors, self.weigh = list(vectors), weigh
        self.spans = [(v.numel(), code) for v, code in self.vectors]
        self.tasks: queue.SimpleQueue[Task | Due | BaseException] = queue.SimpleQueue()
        self.bodies: dict[Member, Tensor] = {me: fill(body, self.header)}
        self.headers: dict[Member, Header] = {me: self.header}
        self.shares: dict[tuple[Member, int], Tensor] = {}
        self.parts: dict[tuple[Member, int], Tensor] = {}
        self.making: dict[Piece, tuple[int, tuple[Member, ...]]] = {}
        self.sent = self.received = 0
        self.weighed = False

    def described(self) -> dict[str, Any]:
        """What somebody must know who takes part in this message without asking it, as JSON: see `coming.Coming`."""
        h, body = self.header, self.bodies[self.me].numel() - HEADER.size
        what = {"n": self.n, "kind": h.kind, "step": h.step, "flags": h.flags & ENDING}
        return {**what, "body": body, "longest": self.longest, "spans": self.spans}

    def tensor(self, piece: Piece) -> Tensor | None:
        """The bytes of a body or part that is here, header and all."""
        return self.bodies.get(piece.of) if piece.what == "body" else self.parts.get((piece.of, piece.attempt))

    def expected(self, what: str) -> Header:
        """The header that should come with a piece, but for what each sender says of itself."""
        legs = {"share": PARTS, "part": MEANS} if self.header.kind == PAYLOAD else {}
        return replace(self.header, kind=legs.get(what, self.header.kind))

    def limit(self, what: str, of: Member, contributors: Sequence[Member]) -> int:
        """Bytes of the body of a piece: exactly, but for bodies where they may differ."""
        if what == "body":
            return self.longest or self.bodies[self.me].numel() - HEADER.size
        there, back = collectives.legs(self.spans, len(contributors))
        leg = there[contributors.index(self.me)] if what == "share" else back[contributors.index(of)]
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

    # ---- calculations, in the thread that waits ------------------------------------------------------------------------

    def cut(self, contributors: Sequence[Member], attempt: int) -> dict[Member, Tensor]:
        """Each contributor's share of the vectors, coded; one's own is kept."""
        made = collectives.shares(self.vectors, len(contributors))
        out = {m: fill(share, self.expected("share")) for m, share in zip(contributors, made, strict=True)}
        self.shares[self.me, attempt] = out[self.me]
        return out

    def average(self, contributors: Sequence[Member], attempt: int) -> Tensor:
        """The coded mean of the part that this rank owns, from all shares, which are used up."""
        weights = self.weigh([self.headers[m] for m in contributors])
        self.weighed = True
        bodies = [self.shares.pop((m, attempt))[HEADER.size :] for m in contributors]
        part = collectives.part_of_mean(bodies, self.spans, weights, contributors.index(self.me))
        self.parts[self.me, attempt] = fill(part, self.expected("part"))
        return self.parts[self.me, attempt]

    def coded(self, due: Due) -> list[Tensor]:
        """The coded parts of the means, without headers, by whose they are; nothing without vectors."""
        return [self.parts[m, due.attempt][HEADER.size :] for m in due.contributors] if self.vectors else []

    def result(self, due: Due) -> tuple[list[Header], list[Tensor], list[Tensor]]:
        """Headers and bodies of the contributors, and the means of the vectors."""
        who, means = due.contributors, list[Tensor]()
        if not self.weighed:
            self.weigh([self.headers[m] for m in who])
        if self.vectors:
            means = collectives.whole(self.coded(due), self.spans)
        return [self.headers[m] for m in who], [self.bodies[m][HEADER.size :] for m in who], means
