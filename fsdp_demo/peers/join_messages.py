"""What a newcomer, its donor and their peer groups say to each other when an island joins a run
under way.

The donor's training hands a `DonorSnapshot` to the `DonorFeed` of its peer group
(`elastic/join_server.py`) at the end of a step, and from then on a `Tick` of each step. The
newcomer reads them from the `Following` of its peer group (`elastic/newcomer.py`), with the
messages that the others have agreed on since. `exchange/snapshot.py` says what a snapshot holds.

On a connection everything is a list of uint8 tensors, the first a head in JSON, never pickle. A
head says how long the rest is. A receiver compares it with what it expects before it makes room.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import torch
import zmq
from msgspec import Meta, Struct
from torch import Tensor

from ..compression import dense as coding
from ..errors import WireError
from ..files import from_json, to_json
from ..membership.protocol_types import Member
from ..net.address import join_address
from .collectives import ReceivedMessage, Spans, legs, whole
from .connection import NOT_THERE, PeerConnection
from .header import Header
from .poller import Poller

T = TypeVar("T")

LONGEST = 16 << 20
"""Bytes of a head."""

DTYPES = {"float32": torch.float32, "uint8": torch.uint8}
"""Of what a snapshot holds."""


class Tick(Struct, frozen=True):
    """One step that the donor has taken.

    Attributes:
        step: its number, from 0.
        rates: for each optimizer and each of its groups, what schedules move
            (`exchange/run_specification.py`), as JSON.
        limit: of DropCompute, if it is chosen (`exchange/drop.py`).
    """

    step: int
    rates: list[list[dict[str, Any]]]
    limit: float = 0.0


@dataclass(frozen=True)
class DonorSnapshot:
    """The state of one rank of the donor at the end of a step.

    Attributes:
        head: what it is of, with the list of the tensors (`exchange/snapshot_head.py`).
        tensors: by name, on the CPU, fp32 or uint8 [n], with memory of their own.
    """

    head: Any
    tensors: dict[str, Tensor]

    def pack(self) -> list[Tensor]:
        """As bytes: the head, then each tensor (views); all uint8 [n]. Raises ValueError: the head
        is longer than LONGEST.
        """
        tensors = (t.contiguous().view(-1).view(torch.uint8) for t in self.tensors.values())
        return [to_bytes(self.head), *tensors]


Listed = Sequence[tuple[str, str, int]]
"""Name, dtype and number of elements of each tensor of a snapshot, in their order."""


def sizes(expected: Listed) -> list[int]:
    """Bytes of each tensor."""
    return [n * DTYPES[dtype].itemsize for _, dtype, n in expected]


def filled(parts: Sequence[Tensor], expected: Listed) -> dict[str, Tensor]:
    """The tensors of a snapshot that have come as bytes, by name.

    Args:
        parts: all but the head, uint8 [n].
        expected: what this rank expects itself.

    Raises:
        ValueError: something is missing, or has another length.
    """
    if len(parts) != len(expected):
        raise ValueError(
            f"the snapshot was cut off: {len(parts)} of {len(expected)} tensors came; join again"
        )
    tensors = {}
    for part, size, (name, dtype, n) in zip(parts, sizes(expected), expected, strict=True):
        if part.dtype != torch.uint8 or part.numel() != size:
            raise ValueError(
                f"the snapshot was cut off: {name} has {part.numel()} bytes, {n} elements of "
                f"{dtype} are {size}; join again"
            )
        tensors[name] = part.contiguous().view(DTYPES[dtype])
    return tensors


# ---- what the others have agreed on ------------------------------------------------------------


class MessageHead(Struct):
    """The head of a message that has come back to the donor.

    Attributes:
        headers, slots, bodies: of each island: its header, its slot where that is known, bytes of
            its body.
        means: elements of each mean. coded: they come in their code.
    """

    headers: list[Header]
    slots: list[int]
    bodies: list[int]
    means: list[int]
    coded: bool


@dataclass(frozen=True)
class Expected:
    """What a newcomer expects of the next message: kind and step as in its header, bytes of each
    body, length and code of each vector that is reduced, and at most how many islands take part.

    With `longest` each body has a length of its own, of so many bytes at most: what the others say
    is not as long as what this one would.
    """

    kind: int
    step: int
    body: int
    vectors: Spans = field(default_factory=tuple)
    islands: int = 1 << 16
    longest: int | None = None

    def sizes(self, head: Tensor) -> list[int]:
        """Bytes behind the head of a packed message; WireError if it is not the expected one."""
        found = self.check(head)
        means = (
            [coding.total_bytes(part) for part in legs(self.vectors, len(found.headers))[1]]
            if found.coded
            else [4 * n for n, _ in self.vectors]
        )
        return found.bodies + means

    def check(self, data: Tensor) -> MessageHead:
        """The head of a packed message. Raises WireError if it is another one than this."""
        head = from_bytes(data, MessageHead, "a message to follow")
        count, bodies, means = len(head.headers), head.bodies, head.means
        if not 0 < count <= self.islands:
            raise WireError(
                f"a message to follow is of {count} islands: allowed are 1 to {self.islands}"
            )
        theirs, mine = {(h.kind, h.step) for h in head.headers}, (self.kind, self.step)
        if theirs != {mine}:
            raise WireError(
                f"messages to follow are of (kind, step) {sorted(theirs)}, here comes {mine}: the "
                "newcomer has lost its place"
            )
        wanted = [self.body] * count
        fit = bodies == wanted
        if self.longest:
            fit = len(bodies) == count and all(0 < b <= self.longest for b in bodies)
        if not fit or means != [n for n, _ in self.vectors] or len(head.slots) not in (0, count):
            allowed = f"1 to {self.longest} each" if self.longest else f"{wanted}"
            raise WireError(
                f"a message to follow has bodies of {bodies} bytes and vectors of {means} values, "
                f"expected are {allowed} and "
                f"{[n for n, _ in self.vectors]}: use one release everywhere"
            )
        return head


def packed(arrived: ReceivedMessage, coded: Sequence[Tensor] = ()) -> list[Tensor]:
    """What came back to the donor as bytes: a head, the bodies, the means; all uint8 [n].

    Args:
        coded: the coded parts of the means, by whose they are (`collectives.whole`): they go
            instead of the means, which are fp32.
    """
    head = MessageHead(
        list(arrived.headers),
        list(arrived.slots),
        [b.numel() for b in arrived.bodies],
        [m.numel() for m in arrived.means],
        bool(coded),
    )
    means = list(coded) or [m.detach().cpu().contiguous().view(torch.uint8) for m in arrived.means]
    return [to_bytes(head), *(b.cpu() for b in arrived.bodies), *means]


def unpacked(parts: Sequence[Tensor], expected: Expected) -> ReceivedMessage:
    """The inverse of `packed`. Raises WireError: it is another message than the expected one, or
    cut off.
    """
    if not parts:
        raise WireError("a message to follow was cut off: nothing came")
    head = expected.check(parts[0])
    wanted, found = expected.sizes(parts[0]), [p.numel() for p in parts[1:]]
    if found != wanted:
        raise WireError(
            f"a message to follow was cut off: parts of {found} bytes, expected are {wanted}"
        )
    first = 1 + len(head.headers)
    bodies, rest = list(parts[1:first]), list(parts[first:])
    means = (
        whole(rest, expected.vectors)
        if head.coded
        else [p.contiguous().view(torch.float32) for p in rest]
    )
    return ReceivedMessage(head.headers, bodies, means, slots=tuple(head.slots))


# ---- a newcomer asks a member ------------------------------------------------------------------

WIRES = ("notes", "ticks", "messages")
"""Connections of a joining island beside those for messages of its own: notes, the snapshot and
ticks, messages to follow.
"""


class Request(Struct):
    """A question at the listener of a member (`elastic/join_server.py`).

    Attributes:
        ask: "status", or "": an island (slot, incarnation, name) wants to come into this peer group
            of a run.
    """

    ask: str = ""
    run: str = ""
    peer_group: int = -1
    slot: int = -1
    incarnation: int = 0
    name: str = ""


Port = Annotated[int, Meta(ge=1, le=65535)]


class LetIn(Struct, tag="let in"):
    """The ports to connect to, one for each of `WIRES` and of the connections for messages."""

    ports: Annotated[list[Port], Meta(min_length=len(WIRES) + 1, max_length=len(WIRES) + 64)]


class Refusal(Struct, tag="refused"):
    """The island cannot come in: it is to ask again, unless that is `final`."""

    why: str
    final: bool = False


class RankStatus(Struct, tag="status"):
    """How a rank stands. launched, delivered: messages. state: of its membership machine. heard:
    seconds since it heard each peer, by slot. joining: the name of the island that joins.
    """

    launched: int
    delivered: int
    state: str
    heard: dict[str, float]
    joining: str


JoinAnswer = LetIn | Refusal | RankStatus
"""What the listener answers to a `Request`."""


def listener_key(member: Member, peer_group: int) -> str:
    """The key in the store of the address at which a member's rank listens."""
    return f"listener/{member.slot}.{member.incarnation}.{peer_group}"


class JoinConnections:
    """The connections between an island that joins and one member, at either end.

    Args:
        member: the island at the other end; me: this one. prefix, peer_group: of the run, and of
            the rank. count: connections for messages of the newcomer's own.

    Attributes:
        listens: this end waits for the other. wires: by the names of `WIRES`. connections: the
            others.
    """

    listens: bool

    def __init__(
        self, poller: Poller, prefix: str, peer_group: int, me: Member, member: Member, count: int
    ):
        def greeting(k: str, sender: Member, receiver: Member) -> bytes:
            text = f"{prefix} {peer_group} {k} {tuple(sender)} {tuple(receiver)}"
            return hashlib.blake2b(text.encode(), digest_size=16).digest()

        self._poller, self.member, self.every = poller, member, list[PeerConnection]()
        try:
            for k in [*WIRES, *(f"connection{i}" for i in range(count))]:
                self.every.append(wire := poller.add(self.listens))
                wire.greet(greeting(k, me, member), greeting(k, member, me))
        except BaseException:
            self.close()
            raise
        self.wires = dict(zip(WIRES, self.every, strict=False))
        self.connections = self.every[len(WIRES) :]

    def close(self) -> None:
        """Close all; who waits for something of them is told."""

        def job() -> None:
            for wire in self.every:
                with self._poller.lock:
                    wire.gone = wire.gone or "closed"
                wire.close(0)

        self._poller.run(job)

    @property
    def met(self) -> bool:
        """Whether both ends of all connections have greeted."""
        return all(w.met for w in self.every)

    @property
    def gone(self) -> str:
        """Why one of them has ended; empty while none has."""
        return next((w.gone for w in self.every if w.gone), "")


def ask_join_server(
    context: Any, keys: Any, host: str, port: int, request: Request, seconds: float
) -> JoinAnswer | None:
    """The answer of a listener; None if nobody listens there, or answers within so many seconds."""
    made = context.socket(zmq.DEALER)
    absent = made.get_monitor_socket(NOT_THERE)
    try:
        made.linger, made.ipv6, made.maxmsgsize = 0, ":" in host, 1 << 16
        if keys is not None:
            keys.connect(made)
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        made.connect(f"tcp://{join_address(str(found), port)}")
        made.send(to_json(request).encode())
        poller = zmq.Poller()
        poller.register(made, zmq.POLLIN)
        poller.register(absent, zmq.POLLIN)
        if made not in dict(poller.poll(int(1e3 * seconds))):
            return None
        return msgspec.json.decode(made.recv(), type=JoinAnswer)
    except (zmq.ZMQError, ValueError, RecursionError, OSError):
        return None
    finally:
        made.disable_monitor()
        absent.close(0)
        made.close(0)


# ---- JSON --------------------------------------------------------------------------------------


def to_bytes(value: Any) -> Tensor:
    """A struct as JSON, uint8 [n]. Raises ValueError for one longer than LONGEST."""
    text = to_json(value).encode()
    if len(text) > LONGEST:
        raise ValueError(f"a head of {len(text)} bytes: allowed are {LONGEST}")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def from_bytes(data: Tensor, form: type[T], what: str, error: type[Exception] = WireError) -> T:
    """The inverse of `to_bytes`. Raises `error` for anything else."""
    if data.dtype != torch.uint8 or data.numel() > LONGEST:
        raise error(f"{what} has {data.numel()} bytes: allowed are {LONGEST}")
    return from_json(bytes(data.tolist()), form, what, error)
