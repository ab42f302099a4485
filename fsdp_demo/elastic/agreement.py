"""What islands agree on before the first step: one run specification, equal parameters, one step to
start from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import WireError, see
from ..peers.header import DIGESTS, NORM, SETUP, memory
from .peer_group import PeerGroup

log = logging.getLogger("fsdp_demo")

LONGEST = 16 << 20  # bytes of a text that an island may send

ADVISORY = ("torch", "device", "processor")  # islands may differ here: warned, not refused


def gather_json(peers: PeerGroup, value: Any, kind: int = SETUP, step: int = 0) -> list[Any]:
    """`value` of every replica, in rank order (JSON, never pickle: nothing a peer sends is
    executed). Raises WireError: an island claims a text of more than LONGEST bytes, or sends one
    that is no JSON. Nothing is made room for before.
    """
    text = json.dumps(value).encode()
    if len(text) > LONGEST:
        raise ValueError(
            f"a value of {len(text)} bytes as JSON, for all islands: allowed are {LONGEST}"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    bodies = peers.gather_any(peers.header(kind, step), data, LONGEST)
    return [_parse(peers, j, body) for j, body in enumerate(bodies)]


def _parse(peers: PeerGroup, j: int, body: Tensor) -> Any:
    try:
        return json.loads(bytes(body.tolist()))
    except (ValueError, RecursionError) as error:
        # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise WireError(
            f"{peers.label(j)} sent {body.numel()} bytes that are no JSON ({error!r:.80})"
        ) from None


def agree(peers: PeerGroup, found: Mapping[str, Any]) -> bool:
    """Compare `found` (flat, JSON values) with those of all replicas. Numbers of optimizers are
    compared where both sides have them.

    Returns:
        Whether an island differs from this one in what may differ (`ADVISORY`); that is logged in
        one line.

    Raises:
        ValueError: on every replica, naming each field that differs with the values of both sides.
    """
    everyone = gather_json(peers, dict(found))
    mine, unlike = everyone[peers.rank], []
    for j, theirs in enumerate(everyone):
        may, must = apart(mine, theirs, peers.names[j])
        unlike += may
        if must:
            here = peers.names[peers.rank]
            raise ValueError(unlike_runs(peers.label(j), here, "; ".join(must[:6])))
    return warned(unlike)


def apart(
    mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str
) -> tuple[list[str], list[str]]:
    """A sentence for each field in which island `name` differs where it may (`ADVISORY`), and for
    each where it may not.
    """
    may, must = [], []
    for k in sorted({*mine, *theirs}, key=lambda k: (k.count("."), k)):
        here, there = mine.get(k), theirs.get(k)
        on_one_side = k.startswith("optimizer") and not (k in mine and k in theirs)
        if here == there or on_one_side:
            continue
        if k in ADVISORY:
            may.append(f"{name} has {k} {there}, here it is {here}")
        else:
            must.append(f"{k}: {here!r} here, {there!r} there")
    return may, must


def warned(unlike: list[str]) -> bool:
    """Log in one line what differs and may, if anything does."""
    if unlike:
        log.warning("%s: replicas may differ in the last bit", "; ".join(unlike))
    return bool(unlike)


def unlike_runs(there: str, here: str, what: str) -> str:
    """The sentence that an island (`PeerGroup.label`) does not run the same as the one named
    `here`, with what to do. what: begins with the first field that differs.
    """
    field = what.partition(":")[0]
    if field.startswith("config"):
        cure = "give attach the same preset and settings on all islands"
    elif field.endswith(".lr"):
        cure = "set the same rates on all islands, and step schedulers as far as exchange.step"
    elif field.startswith("optimizer"):
        cure = "make the same optimizers with the same settings on all islands"
    elif field == "fused":
        cure = "set ISLAND_FUSED=1 where the same Triton and a C compiler are installed"
    elif field.startswith("must_match"):
        cure = "start all islands with the same arguments"
    else:
        cure = "make the same model, sharded alike, on all islands"
    return f"{there} runs something else than {here}: {what}. Cure: {cure}{see('unlike-runs')}"


def digest(tensors: Sequence[Tensor | None]) -> bytes:
    """16 bytes of BLAKE2b over the raw memory of tensors."""
    h = hashlib.blake2b(digest_size=16)
    for t in tensors:
        if t is not None and t.numel():
            h.update(memory(t.detach().cpu().contiguous().view(-1).view(torch.uint8)))
    return h.digest()


def sync_from(peers: PeerGroup, work: Tensor, donor: int, keep: bool = False) -> bool:
    """Give every replica the donor's `work` (fp32 workspace), in place. It is sent where digests
    differ.

    Args:
        keep: this replica keeps its own even if it differs.

    Returns:
        True if `work` changed here.
    """
    wish = b"keep" if keep else b"take"
    marks = [
        bytes(t.tolist())
        for t in peers.all_gather(
            torch.frombuffer(bytearray(digest([work]) + wish), dtype=torch.uint8)
        )
    ]
    needs = [m[:16] != marks[donor][:16] and m[16:] == b"take" for m in marks]
    size, data = work.numel() * work.element_size(), torch.zeros(1, dtype=torch.uint8, device="cpu")
    if peers.rank == donor and any(needs):
        data = work.detach().cpu().view(torch.uint8)
    # Where no rank needs it a byte is sent: another shard of this island may be needed, and all
    # ranks of an island send equally many messages.
    given = peers.gather_any(peers.header(SETUP), data, max(size, 1))[donor]
    if needs[peers.rank]:
        work.copy_(given.view(work.dtype))
    return needs[peers.rank]


def gather_number(
    peers: PeerGroup, value: float, kind: int = SETUP, step: int = 0, setup: bool = True
) -> list[float]:
    """A number of every replica, in rank order: 8 bytes and a header to each."""
    mine = torch.tensor([value], dtype=torch.float64, device="cpu").view(torch.uint8)
    every = peers.all_gather(mine, kind, step, setup)
    return [float(theirs.clone().view(torch.float64)) for theirs in every]


def mean_of(peers: PeerGroup, step: int, value: float) -> float:
    """Mean over the replicas of a number of this step, without those that are not finite."""
    found = gather_number(peers, value, NORM, step, setup=False)
    finite = [v for v in found if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def all_equal(peers: PeerGroup, mark: bytes, kind: int = DIGESTS, step: int = 0) -> bool:
    """Whether `mark` (`digest` of some tensors) is the same on all replicas."""
    marks = peers.all_gather(torch.frombuffer(bytearray(mark), dtype=torch.uint8), kind, step)
    return all(torch.equal(m, marks[0]) for m in marks)


def round_trip(peers: PeerGroup) -> float:
    """Seconds of a round trip between the two islands that are farthest apart, as the kernels have
    seen it, the same on all ranks of the peer group; 0 where one of them does not tell.
    """
    farthest = max(gather_number(peers, peers.seen_round_trip()))
    return farthest if math.isfinite(farthest) else 0.0
