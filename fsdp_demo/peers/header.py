"""The header that stands before every message between islands (payloads, both legs of a reduce,
questions, and set-up), and the meter that counts messages and their bytes.

56 bytes, little-endian:

    4s   magic "FDX2"
    u8   wire version
    u8   kind
    u8   flags
    u8   norm, see `norm_code`
    u48  digest of the configuration; 0 before it is agreed
    u16  seconds of a step, see `rate_code`
    u32  step
    u32  number of the message on its peer group
    u48  bytes of the body
    u16  learning rate, see `rate_code`
    u64  64-bit sum of what must be equal
    f32  weight
    f32  loss; NaN if none
    u32  checksum of the body, see `checksum`
    u32  CRC-32 of the 52 bytes before it

A receiver looks at the header as soon as the first piece of a message is there. So it learns from
it that the sender does something else (finishes, evaluates, is at another step) without waiting for
bytes that will not come, and it never makes room for a length that it did not expect.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from ctypes import c_char
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Mismatch, WireError, see

try:
    from ..compression._kernels import add_up  # type: ignore[import-not-found, unused-ignore]
except ImportError:  # built without a C compiler
    add_up = None

assert sys.byteorder == "little", "the wire format is little-endian and written without swapping"

# 6: no seconds of a step, the digest had 64 bits; 5: notes had other names and no bounds; 4: no
# learning rate; 3: positions of 12 bits, the checksum of a long body was its CRC-32; 2: the
# configuration, and so its digest, had other names
MAGIC, VERSION = b"FDX2", 7
HEADER = struct.Struct("<4sBBHQIIQQffII")
LOW_BITS = 48  # of two numbers: the length of the body, above it the learning rate; the digest of
# the configuration, above it the seconds of a step

STOP = 1  # flag: this island asks all to stop after this step
SKIPPED = 2  # flag: this replica took no step; its plain gradient has no weight
COUNTED = 4  # flag: this island has counted tokens, if not since the last exchange
ENDING = 8  # flag: sent by finish()
# flag: what this replica would have contributed holds NaN or Inf, and has been left out
NOT_FINITE = 16
SUMMED = 32  # flag: `total` is the sum of what must be equal
# flag beside STOP: this island was told to end (SIGTERM), and its process goes on no more
LEAVING = 64
# flag: this island leaves, and sends what it has of the coming payload ahead of its time; `weight`
# is its share in every mean
EARLY = 128
# never sent: the receivers have found the norm far from the members', and leave the contribution
# out (`exchange/watch.py`)
FAR = 256

PASSED = -2.0  # the weight of a pass, which counts in no mean

SETUP, PAYLOAD, PARTS, MEANS, NORM, QUESTION, PARAMETERS, DIGESTS, END, RESET = range(10)
KINDS = (
    "a message of attach()",
    "the payload",
    "vectors to reduce",
    "reduced vectors",
    "a gradient norm",
    "a question",
    "parameters for their mean",
    "a digest of parameters",
    "the end of finish()",
    "a call of reset()",
)
"""What a message is, for errors, by its kind."""

WITHIN = (PAYLOAD, PARTS, MEANS, NORM)  # kinds sent within a step; the others are sent between two


PER_OCTAVE, ONE, BEYOND = 4, 128, 255


def norm_code(norm: float) -> int:
    """A norm in a byte: 0 where there is none, else 1 to 255 in steps of a quarter of an octave,
    128 for 1. So it is known to 9 %, between 3e-10 and 4e9; beyond that the nearest. NaN is BEYOND,
    as Inf is: what holds it must not be added.

    >>> [norm_code(norm) for norm in (0.0, 1.0, 2.0, 1e6, float("inf"), float("nan"))]
    [0, 128, 132, 208, 255, 255]
    """
    if norm <= 0:
        return 0
    if not math.isfinite(norm):
        return BEYOND
    return min(max(round(PER_OCTAVE * math.log2(norm)) + ONE, 1), BEYOND)


def norm_of(code: int) -> float:
    """The inverse of `norm_code`."""
    return 2.0 ** ((code - ONE) / PER_OCTAVE) if code else 0.0


RATE_PER_OCTAVE, RATE_ONE, RATE_BEYOND = 1024, 40960, 65535


def rate_code(rate: float) -> int:
    """A learning rate, or seconds, in 16 bits: 0 where there is none, else 1 to 65535 in steps of
    1/1024 of an octave, 40960 for 1. So it is known to 0.034 %, between 9e-13 and 2e7; beyond that
    the nearest.

    >>> [rate_code(rate) for rate in (0.0, 1.0, 2.0, 3e-4, float("nan"))]
    [0, 40960, 41984, 28976, 0]
    """
    if not 0 < rate < math.inf:
        return 0
    return min(max(round(RATE_PER_OCTAVE * math.log2(rate)) + RATE_ONE, 1), RATE_BEYOND)


def rate_of(code: int) -> float:
    """The inverse of `rate_code`."""
    return 2.0 ** ((code - RATE_ONE) / RATE_PER_OCTAVE) if code else 0.0


@dataclass(frozen=True)
class Header:
    """What every message says about itself.

    Attributes:
        digest: of the configuration.
        step: of a payload the step it is sent in, from 0; else the steps done.
        weight: the sender's share in a mean; less than 0: none, whatever the channel's weights.
            loss: NaN where unknown. PASSED: see `late`.
        total: 64-bit sum of what must be equal on all replicas, if `flags` has SUMMED.
        number: of the message on its peer group, the same on all its ranks.
        norm: `norm_code` of what the sender contributes, of its whole island: the same on all its
            ranks. 0 where unknown.
        rate: `rate_code` of the sender's learning rate, the mean over its parameter groups. 0 where
            it is not said.
        seconds: `rate_code` of the seconds of a step of the sender's island, without waiting. 0
            where they are not said.
    """

    digest: int
    step: int
    weight: float = 1.0
    loss: float = float("nan")
    flags: int = 0
    kind: int = PAYLOAD
    total: int = 0
    number: int = 0
    norm: int = 0
    rate: int = 0
    seconds: int = 0

    @property
    def late(self) -> bool:
        """Whether the sender passes: what it has trained goes with its next message."""
        return self.weight == PASSED

    @property
    def at_step(self) -> int:
        """The step at which the sender stands, counted from 1 as in all that users read."""
        return self.step + (self.kind in WITHIN and not self.flags & ENDING)

    @property
    def when(self) -> str:
        """Where the sender stands, in words."""
        return f"{'finished' if self.flags & ENDING else 'is'} at step {self.at_step}"


def _head(header: Header, body: Tensor) -> Tensor:
    """The first bytes of a message with this body, uint8 [56]."""
    h, crc, flags = header, checksum(body), header.flags & 0xFF | header.norm << 8
    fields = (
        MAGIC,
        VERSION,
        h.kind,
        flags,
        h.digest | h.seconds << LOW_BITS,
        h.step,
        h.number,
        body.numel() | h.rate << LOW_BITS,
        h.total,
        h.weight,
        h.loss,
        crc,
    )
    head = HEADER.pack(*fields, 0)[:-4]
    return torch.frombuffer(
        bytearray(head + struct.pack("<I", zlib.crc32(head))), dtype=torch.uint8
    )


class Sealed(NamedTuple):
    """A message where it lies: its first bytes, uint8 [56], and its body, uint8 [n]; on the CPU."""

    head: Tensor
    body: Tensor

    @classmethod
    def of(cls, header: Header, body: Tensor) -> Sealed:
        """A body, and the first bytes of a message with this header and this body."""
        return cls(_head(header, body), body)

    @property
    def size(self) -> int:
        """Bytes of header and body."""
        return HEADER.size + self.body.numel()


def claimed(head: bytes) -> tuple[Header, int]:
    """The header that a message's first 56 bytes claim, and the bytes of its body; not checked."""
    fields = HEADER.unpack(head)
    return _read(fields), fields[7] % (1 << LOW_BITS)


def _read(fields: tuple[Any, ...]) -> Header:
    """The fields of a message's first bytes as a header."""
    _, _, kind, flags, digest, step, number, length, total, weight, loss, _, _ = fields
    (seconds, digest), rate = divmod(digest, 1 << LOW_BITS), length >> LOW_BITS
    known = digest, step, weight, loss, flags & 0xFF, kind, total, number
    return Header(*known, flags >> 8, rate, seconds)


def open_head(head: bytes, expected: Header, size: int, sender: str) -> tuple[Header, int]:
    """Check the first 56 bytes of a message against what should come: `expected`, with a body of
    `size` bytes.

    Returns:
        The sender's header, and the checksum of its body.

    Raises:
        WireError: torn, or of another wire version. Mismatch: the sender does something else; says
            what both do.
    """
    body_crc = _refuse_torn(head, sender)
    theirs, length = claimed(head)
    if (theirs.kind, theirs.step, theirs.flags & ENDING) != (
        expected.kind,
        expected.step,
        expected.flags & ENDING,
    ):
        raise Mismatch(_apart(theirs, expected, sender))
    if theirs.digest != expected.digest:
        both = (
            f"{theirs.digest:012x}, ours is {expected.digest:012x}: start all islands with one "
            "configuration"
        )
        raise Mismatch(f"message from {sender} has configuration digest {both}{see('unlike-runs')}")
    if length != size or theirs.number != expected.number:
        raise Mismatch(
            f"{_name(theirs)} from {sender} is message {theirs.number} with {length} bytes, "
            f"expected message {expected.number} with {size}: all islands must "
            "make the same calls in the same order, with values of the same form"
        )
    return theirs, body_crc


def _refuse_torn(head: bytes, sender: str) -> int:
    """Raise WireError where the header itself is wrong; the checksum of the body."""
    magic, version, *_, body_crc, crc = HEADER.unpack(head)
    if magic != MAGIC or version != VERSION:
        wanted = f"expected {MAGIC!r} version {VERSION}"
        raise WireError(
            f"message from {sender} starts with {magic!r} version {version}, {wanted}: use one "
            "release everywhere"
        )
    if crc != zlib.crc32(head[:-4]):
        raise WireError(
            f"message from {sender} is damaged: the checksum of its header does not fit"
        )
    return int(body_crc)


def check_body(body: Tensor, crc: int, theirs: Header, sender: str) -> Tensor:
    """The body, if its checksum fits. Raises WireError: it does not."""
    if checksum(body) != crc:
        raise WireError(
            f"{_name(theirs)} from {sender} is damaged: its checksum does not fit its "
            f"{body.numel()} bytes"
        )
    return body


ROW = 2048  # words of 8 bytes


def checksum(body: Tensor) -> int:
    """32 bits of a body (uint8 [n] on the CPU, contiguous), at the pace of memory.

    What fills whole rows of 2048 words (u64) is summed by columns and by rows, modulo 2^64. The
    checksum is the CRC-32 of the 2048 sums of columns, the sums of rows, and the bytes behind the
    last row. So that of a body under 16 KiB is its CRC-32. A CRC-32 of all bytes takes 0.56 ms per
    MiB, this one 0.11 in C and 0.23 in torch (2026-11-28, one shared core of an Intel Xeon).

    It is for damage by chance, like a CRC-32: what is left unseen is one case in 2^32. One word
    that has changed, or two that have changed places, have always changed a sum. Sums are blind to
    changes in at least four words at the corners of a rectangle that add up to zero.
    """
    rows = body.numel() // (8 * ROW)
    if rows == 0:
        return zlib.crc32(memory(body))
    if add_up is not None:
        sums = torch.zeros(ROW + rows, dtype=torch.int64, device="cpu")
        add_up(body.data_ptr(), rows, sums.data_ptr())
    else:
        whole = memory(body[: 8 * ROW * rows])  # which may begin anywhere
        words = torch.frombuffer(whole, dtype=torch.int64).view(rows, ROW)
        sums = torch.cat([words.sum(0), words.sum(1)])
    return zlib.crc32(memory(body[8 * ROW * rows :]), zlib.crc32(memory(sums)))


def _name(header: Header) -> str:
    return KINDS[header.kind] if header.kind < len(KINDS) else f"a message of kind {header.kind}"


def _apart(theirs: Header, mine: Header, sender: str) -> str:
    """What a sender and this rank do that is not the same, and the cure."""
    where = f"{sender} {theirs.when}, we {mine.when.replace('is at', 'are at')}"
    if theirs.when.rpartition(" ")[2] == mine.when.rpartition(" ")[2]:
        return (
            f"{where}; {_name(theirs)} came from there, {_name(mine)} was expected: all islands "
            "must make the same calls at the same step "
            f"(evaluations under outer_parameters, across_islands, finish){see('unlike-steps')}"
        )
    if (theirs.flags | mine.flags) & ENDING:
        return (
            f"{where}: give all islands the same number of steps (max_steps, or data with as many "
            "rows). Call skip() for a step that a loop drops, and stop early on all islands by "
            f"request_stop(together=True){see('step-count')}"
        )
    return (
        f"{where}: the islands do not take the same steps. Call skip() for a step that a loop "
        f"drops, and give all islands data with as many rows{see('unlike-steps')}"
    )


def memory(t: Tensor) -> Any:
    """The memory of a contiguous CPU tensor as a buffer, without a copy and without numpy. The
    buffer keeps the tensor alive, also where nobody else holds it, such as a copy from a GPU.
    """
    if not t.numel():
        return b""
    buffer: Any = (c_char * (t.numel() * t.element_size())).from_address(t.data_ptr())
    buffer.tensor = t
    return buffer


# ---- what is counted ---------------------------------------------------------------------------


@dataclass
class Meter:
    """Counts of one rank. Bytes are those handed to the connections, to the byte: its frames
    (`pieces.py`) and TCP/IP headers come on top.

    Attributes:
        exchanges: ticks on which something was exchanged.
        messages: rounds of sends on the replicate axis (a payload: one; a reduce: header and two
            legs, three).
        bytes_sent, bytes_received: to and from the other replicas.
        seconds_exchanging: from when an exchange is on the host to its end, in flight.
        seconds_waiting: in which training stood still for the link. The time in which it stood
            still for its own GPU, which had to end the step first, is not among them.
        setup_bytes: bytes sent before the first step and in digests (initial broadcast); not part
            of `bytes_sent`.

    Example: `Exchange.metrics()` shows these counts.
        >>> from fsdp_demo import Meter
        >>> Meter(messages=1, bytes_sent=3000).bytes_sent
        3000
    """

    exchanges: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_exchanging: float = 0.0
    seconds_waiting: float = 0.0
    setup_bytes: int = 0

    def count(self, sent: int, received: int, rounds: int = 1) -> None:
        """Count the bytes of a number of rounds of sends."""
        self.messages += rounds
        self.bytes_sent += sent
        self.bytes_received += received

    def add(self, other: Meter) -> None:
        """Add another meter's counts."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def ring_all_reduce_bytes(replicas: int, payload: int) -> int:
    """Bytes one rank sends in a ring all-reduce of `payload` bytes: 2 (R - 1) / R times the
    payload.

    Example:
        >>> from fsdp_demo import ring_all_reduce_bytes
        >>> ring_all_reduce_bytes(2, 1000)
        1000
    """
    return 2 * payload * (replicas - 1) // replicas
