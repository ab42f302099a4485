"""What a method calls its model: the anchors where all replicas share them, else the mean of the replicas' parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .channel import ActiveChannel
from .island import Island
from .mailbox import Mailbox
from .transport import Line, reduce


def mean_parameters(parameters: ActiveChannel, mailbox: Mailbox, line: Line | None) -> Tensor | None:
    """Mean of the parameters over the replicas as a workspace of this lane, fp32; all replicas call it at the same step."""
    work = parameters.pack("parameter")
    if line is None or work is None:
        mailbox.ask(lambda: None)
        return work if mailbox.courier is None and parameters.size == 1 else None
    vector = work.cpu()
    means: list[Tensor] = mailbox.ask(lambda: reduce(line, [(vector, "fp32")], [[1.0] * line.size]))
    return means[0].to(work.device)


def set_mean(parameters: ActiveChannel, mailbox: Mailbox, line: Line | None, island: Island) -> float:
    """Replace the parameters by their mean over the replicas; returns the drift of this one, |theta - mean| / |mean|."""
    own = parameters.tensors("parameter")
    before = [t.float().clone() for t in own if t is not None]
    parameters.write(mean_parameters(parameters, mailbox, line), own)
    after = [t.float() for t in own if t is not None]
    far = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    return drift(island, far, sum(float(a.square().sum()) for a in after))


def drift(island: Island, far: float, norm: float) -> float:
    """|theta - mean| / |mean| of this replica from this rank's squared norms."""
    far, norm = island.total(far, norm)
    return math.sqrt(far / norm) if norm else 0.0


@contextmanager
def shown(
    model: torch.nn.Module,
    channels: Sequence[ActiveChannel],
    parameters: ActiveChannel,
    mailbox: Mailbox,
    line: Line | None,
    anchors: bool,
) -> Iterator[None]:
    """Within this context `model` holds the anchors of its delta channels, or the mean over the replicas."""
    tensors = [t for t in parameters.shards.read("parameter") if t is not None]
    kept = [t.clone() for t in tensors]
    with torch.no_grad():
        if anchors:
            for c in (c for c in channels if c.channel.source == "delta"):
                c.show_anchor()
        else:
            parameters.write(mean_parameters(parameters, mailbox, line), parameters.tensors("parameter"))
    parameters.shards.commit(model)
    try:
        yield
    finally:
        parameters.shards.commit(model)
        with torch.no_grad():
            for t, old in zip([t for t in parameters.shards.read("parameter") if t is not None], kept, strict=True):
                t.copy_(old)
        parameters.shards.commit(model)
