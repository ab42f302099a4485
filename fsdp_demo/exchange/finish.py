"""What all islands do together outside a step: the end of an exchange, whose last message leaves
all replicas with one model; the view of the method's result during the run (`shown`); and the new
state from parameters that a script has written (`reset`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..channels.state import LocalChannel
from ..elastic import agreement
from ..elastic.peer_group import PeerGroup
from ..errors import NotFinite, first_few, see
from ..hosts.base import TrainingHost, plain_name
from ..peers.header import DIGESTS, PARAMETERS, RESET
from .runtime import StepRuntime
from .watch import drift

log = logging.getLogger("fsdp_demo")


@contextmanager
def shown(runtime: StepRuntime, model: torch.nn.Module, what: str) -> Iterator[None]:
    """Within this context `model` holds the replica's own "parameters", the "anchor" of its delta
    channels, or the "mean" over the replicas."""
    parameters, host = runtime.parameters, runtime.host
    kept: list[Tensor] = []
    if what != "parameters":
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
        if kept:
            own = [t for t in host.tensors("parameter") if t is not None]
            with torch.no_grad():
                for t, old in zip(own, kept, strict=True):
                    t.copy_(old)
            host.commit(model)


def mean_parameters(runtime: StepRuntime, only: LocalChannel | None = None) -> Tensor | None:
    """Mean of the parameters over the replicas with finite ones, as a workspace of this copy, fp32.
    All replicas call it at the same step. only: a channel over some of them. Raises NotFinite: on
    all replicas, if no replica has finite parameters.
    """
    work, peers = (only or runtime.parameters).pack("parameter"), runtime.peers
    share = 1.0 - float(runtime.island.not_finite([work] if work is not None else []))
    if peers is None or work is None:
        runtime.queue.ask(lambda peers: None)
        return work if peers is None and runtime.parameters.size == 1 else None
    vector = work.cpu() if share else torch.zeros(work.numel(), dtype=torch.float32, device="cpu")
    header = peers.header(PARAMETERS if only is None else RESET, runtime.step)

    counts = torch.tensor([share], dtype=torch.float32, device="cpu")

    def job(peers: PeerGroup) -> Tensor:
        mean, part = peers.mean(header, [(vector, "fp32"), (counts, "fp32")])
        if not float(part):
            raise NotFinite(
                f"no island has finite parameters (NaN or Inf) at step {runtime.step}: resume from "
                "a checkpoint"
            )
        return mean if float(part) == 1.0 else mean.div_(part)

    mean: Tensor = runtime.queue.ask(job)
    return mean.to(work.device)


def set_mean(runtime: StepRuntime) -> None:
    """Set parameters to their mean over the replicas; note the drift, |theta - mean| / |mean|."""
    own = runtime.parameters.tensors("parameter")
    before = [t.float().clone() for t in own if t is not None]
    runtime.parameters.write(mean_parameters(runtime), own)
    after = [t.float() for t in own if t is not None]
    far = sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))
    whole = sum(float(a.square().sum()) for a in after)
    runtime.note_drift(drift(runtime.island, far, whole))
    runtime.host.commit()


def equal(runtime: StepRuntime) -> bool:
    """Whether the trained parameters of all replicas are bit-equal now. A collective of all."""
    mark = b""
    if runtime.peers is not None:  # behind what this thread has queued on a device
        both = zip(runtime.host.tensors("parameter"), runtime.host.params, strict=True)
        mark = agreement.digest([t for t, s in both if not s.frozen])
    same = runtime.queue.ask(lambda peers: agreement.all_equal(peers, mark, DIGESTS, runtime.step))
    return not runtime.island.any(same is False)


def flush(runtime: StepRuntime) -> None:
    """Wait for the messages in flight and apply them, oldest first. Late gradients get a base step
    of their own, which does not count.
    """
    while (oldest := runtime.queue.oldest()) is not None:
        late, due = oldest
        gradients = [c for c in late if c.channel.before_step]
        if gradients:  # those of another channel have had their step
            runtime.host.prepare_gradients([False] * len(runtime.host.params))
        runtime.land(late, due, now=runtime.step - 1)
        if gradients:
            runtime.clip_mean()
            with runtime.hooks.paused():
                runtime.base_step()


def conclude(runtime: StepRuntime) -> bool | None:
    """The last exchange; returns whether parameters are bit-equal now, None where the preset
    promises no such thing.

    Without that promise, or where bits differ nevertheless (on unlike hardware, say), the
    parameters become their mean over the replicas; `StepRuntime.drift` is this one's distance.

    The changes since the last exchange are a part of a round. An outer step on them would repeat
    nearly all of the momentum of the round before, so the anchor takes the plain mean: outer rate
    1, no momentum. The rest in the accumulators is lost.
    """
    if runtime.peers is not None:
        runtime.peers.end()
    if not runtime.config.equal_at_end:
        flush(runtime)
        runtime.exchange(
            runtime.buffers, runtime.buffers, math.inf, now=runtime.step - 1, last=True
        )
        set_mean(runtime)
        return None
    _exchange_last(runtime)
    if equal(runtime):
        return True
    set_mean(runtime)
    if runtime.topology.rank == 0:
        log.warning(
            "%s: parameters differed between islands at the end (unlike hardware, or unlike "
            "training): they are the mean over the islands now. Those here were %.2g of their norm "
            "away",
            runtime.topology.name,
            runtime.drift,
        )
    return equal(runtime)


def _exchange_last(runtime: StepRuntime) -> None:
    """Exchange what differs between the replicas: deltas since the last exchange, parameters."""
    queue = runtime.queue
    # a copy without peers has not heard of it
    owed = runtime.backup is not None and runtime.island.any(bool(queue.history.late))
    moving = [c for c in queue.channels if c.channel.writes_parameters]
    # Channels that queue deltas send first: landing the messages in flight sets the parameters to
    # the anchor less what is under way.
    runtime.send(
        [c for c in moving if c.channel.queues and queue.last[c.channel.name] < runtime.step],
        partial=True,
    )
    flush(runtime)
    # Parameters that were mixed, or corrected after a delay, are sent once more even if they went
    # out in the last step.
    late = [
        c
        for c in moving
        if owed
        or queue.last[c.channel.name] < runtime.step
        or (c.channel.source == "parameter" and not c.channel.equal_after_exchange)
    ]
    runtime.exchange(moving, late, math.inf, now=runtime.step - 1, last=True)
    for c in moving:
        if c.channel.source == "delta" and not c.channel.equal_after_exchange:
            c.show_anchor()
    runtime.host.commit()


# ---- parameters that a script has written --------------------------------------------------------


def reset(runtime: StepRuntime, parameters: Iterable[Tensor | str]) -> None:
    """`Exchange.reset`: the mean of these parameters is the new anchor, and what channels keep of
    them begins anew. An island that is joining starts over from a new snapshot
    (`elastic/newcomer.py`). All ranks of all islands call it together.
    """
    indices, wrong = _indices(runtime.host, parameters)
    _agree_to_reset(runtime, sorted({runtime.host.params[i].name for i in indices}), wrong)
    if runtime.donor_feed is not None:
        runtime.donor_feed.tick(None)
    only = runtime.parameters.narrowed(indices)
    written = only.pack("parameter")
    flush(runtime)  # which writes these tensors, too
    only.write(written, only.tensors("parameter"))
    only.write(mean_parameters(runtime, only), only.tensors("parameter"))
    runtime.host.commit()
    for c in runtime.channels:
        c.restart(indices)
    runtime.queue.history.hear_reset(runtime.step)


def _indices(host: TrainingHost, parameters: Iterable[Tensor | str]) -> tuple[set[int], str]:
    """The indices of these parameters in the host's `params`, and what is wrong with the rest."""
    given = [parameters] if isinstance(parameters, (Tensor, str)) else list(parameters)
    places: dict[int | str, set[int]] = {}
    for i, s in enumerate(host.params):
        for key in () if s.frozen else (s.name, id(host.parameter(i))):
            places.setdefault(key, set()).add(i)
    found = [places.get(plain_name(p) if isinstance(p, str) else id(p), set()) for p in given]
    odd = [p for p, indices in zip(given, found, strict=True) if not indices]
    if given and not odd:
        return set().union(*found), ""
    words = {id(host.parameter(i)): s.name for i, s in enumerate(host.params)} | {
        id(p): repr(p) for p in odd if isinstance(p, str)
    }
    what = [words.get(id(p), f"a {type(p).__name__} {[*getattr(p, 'shape', ())]}") for p in odd]
    return set(), (
        f"reset() got {first_few(what) or 'no parameter'}: it takes whole parameters that the "
        "attached optimizers train, as they are in the sharded model, or their names, such as "
        f"{host.params[0].name!r}; no frozen ones, no parts"
    )


def _agree_to_reset(runtime: StepRuntime, names: list[str], wrong: str) -> None:
    """Raise ValueError on all ranks if steps or names differ, or something is `wrong` on one."""
    mine, name = [runtime.step, names, wrong], runtime.topology.name

    def ask(peers: PeerGroup) -> list[Any]:
        everyone = agreement.gather_json(peers, mine, RESET, runtime.step)
        return [[peers.label(j), *theirs] for j, theirs in enumerate(everyone)]

    heard = [[name, *mine], *(runtime.queue.ask(ask) or [])]
    everyone = [told for rank in runtime.island.everyone(heard) for told in rank]
    for who, *_, wrong in everyone:
        if wrong:
            raise ValueError(f"{who}: {wrong}{see('reset')}")
    shared = set(names).intersection(*(theirs for _, _, theirs, _ in everyone))
    unlike = {
        f"step {step}, {first_few([n for n in theirs if n not in shared]) or 'no others'}": who
        for who, step, theirs, _ in everyone
    }
    if len(unlike) > 1:
        raise ValueError(
            "all islands call reset() at the same step, with the same parameters. Here come "
            + "; ".join(f"from {who}: {what}" for what, who in unlike.items())
            + see("reset")
        )
