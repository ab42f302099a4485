"""What a method calls its model (`ExchangeConfig.result`), made on the ranks of a run: the anchors, or the mean of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..comm import agreement
from ..comm.digests import digest
from ..comm.header import DIGESTS, PARAMETERS
from ..comm.peers import Line
from ..errors import NotFinite
from .runtime import Flow, drift


@contextmanager
def shown(flow: Flow, model: torch.nn.Module, what: str) -> Iterator[None]:
    """Within this context `model` holds the replica's own "parameters", the "anchor" of its delta channels, or the "mean" over the
    replicas; in the end it holds its own."""
    parameters, shards = flow.parameters, flow.shards
    if what == "parameters":
        try:
            yield
        finally:
            shards.commit(model)
        return
    kept = [t.clone() for t in shards.read("parameter") if t is not None]
    with torch.no_grad():
        if what == "anchor":
            for c in (c for c in flow.channels if c.channel.source == "delta"):
                c.show_anchor()
        else:
            parameters.write(mean_parameters(flow), parameters.tensors("parameter"))
    shards.commit(model)
    try:
        yield
    finally:
        shards.commit(model)
        with torch.no_grad():
            for t, old in zip([t for t in shards.read("parameter") if t is not None], kept, strict=True):
                t.copy_(old)
        shards.commit(model)


def mean_parameters(flow: Flow) -> Tensor | None:
    """Mean of the parameters over the replicas as a workspace of this lane, fp32; all replicas call it at the same step. Replicas whose
    parameters are not finite have no share in it.

    Raises:
        NotFinite: on all replicas, if no replica has finite parameters.
    """
    work, line = flow.parameters.pack("parameter"), flow.line
    share = 1.0 - float(flow.island.not_finite([work] if work is not None else []))
    if line is None or work is None:
        flow.mailbox.ask(lambda line: None)
        return work if line is None and flow.parameters.size == 1 else None
    vector, header = work.cpu() if share else torch.zeros(work.numel()), line.header(PARAMETERS, flow.step)

    def job(line: Line) -> Tensor:
        mean, part = line.mean(header, [(vector, "fp32"), (torch.tensor([share]), "fp32")])
        if not float(part):
            raise NotFinite(f"no island has finite parameters (NaN or Inf) at step {flow.step}: resume from a checkpoint")
        return mean if float(part) == 1.0 else mean.div_(part)

    mean: Tensor = flow.mailbox.ask(job)
    return mean.to(work.device)


def set_mean(flow: Flow) -> float:
    """Replace the parameters by their mean over the replicas; returns the drift of this one, |theta - mean| / |mean|."""
    own = flow.parameters.tensors("parameter")
    before = [t.float().clone() for t in own if t is not None]
    flow.parameters.write(mean_parameters(flow), own)
    after = [t.float() for t in own if t is not None]
    far = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    return drift(flow.island, far, sum(float(a.square().sum()) for a in after))


def equal(flow: Flow) -> bool:
    """Whether the parameters of all replicas are bit-equal now. All ranks of all islands call it at the same step."""
    mark = digest(flow.shards.read("parameter")) if flow.line is not None else b""  # behind what this thread has queued on a device
    same = flow.mailbox.ask(lambda line: agreement.all_equal(line, mark, DIGESTS, flow.step))
    return not flow.island.any(same is False)
