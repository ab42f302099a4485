"""What islands agree on before the first step: one run specification, equal parameters, one step to start from."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .codecs.wire import WireError
from .shards import Shard, digest
from .transport import Line

log = logging.getLogger("fsdp_demo")

ADVISORY = ("torch", "device")  # islands may differ here: warned, not refused


def gather_json(line: Line, value: Any) -> list[Any]:
    """`value` of every replica (JSON, never pickle: nothing a peer sends is executed)."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    length = torch.tensor([data.numel()]).view(torch.uint8)
    sizes = [int(t.view(torch.int64)) for t in line.all_gather(length, setup=True)]
    return [json.loads(bytes(t.tolist())) for t in line.swap([data] * line.size, sizes, setup=True)]


def shapes_digest(shards: Sequence[Shard]) -> str:
    """16 hexadecimal digits over names, shapes and local shapes in order."""
    text = json.dumps([(s.name, s.global_shape, s.shape, s.frozen) for s in shards])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def agree(line: Line, facts: Mapping[str, Any]) -> None:
    """Compare `facts` (flat, JSON values) with those of all replicas.

    Raises:
        ValueError: on every replica, naming each field that differs with the values of both sides.
    """
    everyone = gather_json(line, dict(facts))
    mine = everyone[line.rank]
    for j, theirs in enumerate(everyone):
        keys = [k for k in sorted({*mine, *theirs}, key=lambda k: (k.count("."), k)) if mine.get(k) != theirs.get(k)]
        for k in [k for k in keys if k in ADVISORY]:
            there, here = theirs.get(k), mine.get(k)
            log.warning("%s has %s %s, here it is %s: replicas may differ in the last bit", line.names[j], k, there, here)
        hard = [f"{k}: {mine.get(k)!r} here, {theirs.get(k)!r} there" for k in keys if k not in ADVISORY]
        if hard:
            raise ValueError(f"island {j} ({line.names[j]}) runs something else than {line.names[line.rank]}: " + "; ".join(hard[:6]))


def equalise(line: Line, work: Tensor, donor: int, keep: bool = False) -> bool:
    """Give every replica the donor's `work` (fp32 workspace), in place, sending nothing where digests already agree.

    Args:
        keep: this replica keeps its own even if it differs.

    Returns:
        True if `work` changed here.
    """
    wish = b"keep" if keep else b"take"
    marks = [bytes(t.tolist()) for t in line.all_gather(torch.frombuffer(bytearray(digest([work]) + wish), dtype=torch.uint8), setup=True)]
    needs = [m[:16] != marks[donor][:16] and m[16:] == b"take" for m in marks]
    mine = line.rank
    data = work.detach().cpu().view(torch.uint8) if mine == donor else torch.empty(0, dtype=torch.uint8)
    empty = data[:0]
    outgoing = [data if mine == donor and needs[j] else empty for j in range(line.size)]
    size = work.numel() * work.element_size()
    incoming = line.swap(outgoing, [size if j == donor and needs[mine] else 0 for j in range(line.size)], setup=True)
    if needs[mine]:
        work.copy_(incoming[donor].view(work.dtype))
    return needs[mine]


def mean_of(line: Line, step: int, value: float) -> float:
    """Mean over the replicas of a number of this step: 16 bytes to each.

    Raises:
        WireError: a replica is at another step.
    """
    mine = torch.tensor([float(step), value], dtype=torch.float64).view(torch.uint8)
    pairs = [m.clone().view(torch.float64).tolist() for m in line.all_gather(mine)]
    for j, (theirs, _) in enumerate(pairs):
        if theirs != step:
            raise WireError(f"{line.label(j)} is at step {theirs:g}, we are at step {step}: the islands do not take the same steps")
    return float(sum(v for _, v in pairs) / len(pairs))


def all_equal(line: Line, mark: bytes) -> bool:
    """Whether `mark` (`shards.digest` of some tensors) is the same on all replicas."""
    marks = line.all_gather(torch.frombuffer(bytearray(mark), dtype=torch.uint8), setup=True)
    return all(torch.equal(m, marks[0]) for m in marks)
