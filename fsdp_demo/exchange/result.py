"""What a method calls its model (`ExchangeConfig.result`), made on the ranks of a run: the anchors,
or the mean of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..comm import agreement
from ..comm.digests import digest
from ..comm.header import DIGESTS, PARAMETERS
from ..comm.peers import PeerGroup
from ..errors import NotFinite
from .runtime import StepRuntime, drift


@contextmanager
def shown(runtime: StepRuntime, model: torch.nn.Module, what: str) -> Iterator[None]:
    """Within this context `model` holds the replica's own "parameters", the "anchor" of its delta
    channels, or the "mean" over the replicas; in the end it holds its own."""
    parameters, host = runtime.parameters, runtime.host
    if what == "parameters":
        try:
            yield
        finally:
            host.commit(model)
        return
    kept = [t.clone() for t in host.tensors("parameter") if t is not None]
    with torch.no_grad():
        if what == "anchor":
            for c in (c for c in runtime.channels if c.channel.source == "delta"):
                c.show_anchor()
        else:
            parameters.write(mean_parameters(runtime), parameters.tensors("parameter"))
    host.commit(model)
    try:
        yield
    finally:
        host.commit(model)
        with torch.no_grad():
            for t, old in zip(
                [t for t in host.tensors("parameter") if t is not None], kept, strict=True
            ):
                t.copy_(old)
        host.commit(model)


def mean_parameters(runtime: StepRuntime) -> Tensor | None:
    """Mean of the parameters over the replicas as a workspace of this copy, fp32; all replicas call
    it at the same step. Replicas whose parameters are not finite have no share in it.

    Raises:
        NotFinite: on all replicas, if no replica has finite parameters.
    """
    work, peers = runtime.parameters.pack("parameter"), runtime.peers
    share = 1.0 - float(runtime.island.not_finite([work] if work is not None else []))
    if peers is None or work is None:
        runtime.queue.ask(lambda peers: None)
        return work if peers is None and runtime.parameters.size == 1 else None
    vector = work.cpu() if share else torch.zeros(work.numel(), dtype=torch.float32, device="cpu")
    header = peers.header(PARAMETERS, runtime.step)

    def job(peers: PeerGroup) -> Tensor:
        mean, part = peers.mean(
            header,
            [(vector, "fp32"), (torch.tensor([share], dtype=torch.float32, device="cpu"), "fp32")],
        )
        if not float(part):
            raise NotFinite(
                f"no island has finite parameters (NaN or Inf) at step {runtime.step}: resume from "
                "a checkpoint"
            )
        return mean if float(part) == 1.0 else mean.div_(part)

    mean: Tensor = runtime.queue.ask(job)
    return mean.to(work.device)


def set_mean(runtime: StepRuntime) -> float:
    """Replace the parameters by their mean over the replicas; returns the drift of this one, |theta
    - mean| / |mean|.
    """
    own = runtime.parameters.tensors("parameter")
    before = [t.float().clone() for t in own if t is not None]
    runtime.parameters.write(mean_parameters(runtime), own)
    after = [t.float() for t in own if t is not None]
    far = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    return drift(runtime.island, far, sum(float(a.square().sum()) for a in after))


def equal(runtime: StepRuntime) -> bool:
    """Whether the trained parameters of all replicas are bit-equal now. All ranks of all islands
    call it at the same step.
    """
    both = zip(runtime.host.tensors("parameter"), runtime.host.params, strict=True)
    # behind what this thread has queued on a device
    mark = digest([t for t, s in both if not s.frozen]) if runtime.peers is not None else b""
    same = runtime.queue.ask(lambda peers: agreement.all_equal(peers, mark, DIGESTS, runtime.step))
    return not runtime.island.any(same is False)
