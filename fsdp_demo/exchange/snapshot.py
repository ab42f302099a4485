"""The snapshot with which an island joins a run under way: a donor takes it at the end of a step,
the newcomer starts from it.

Its tensors by the source of a channel:

* delta: anchor and outer momentum. The newcomer's parameters are the anchor: with the donor's, the
  donor's steps since the last exchange would count twice. Its accumulator is zero for the same
  reason.
* gradient: parameters and optimizer states. The accumulator is zero.
* parameter: parameters; where a mean comes late, also the values that the donor sent for it.
* state:NAME: optimizer states.

Frozen parameters and buffers go with them, and the list of messages under way; their answers follow
and act at their own step. Inner optimizers of the other presets go on from the newcomer's own
checkpoint, or begin anew. Each rank of the donor gives its active copy and shard to one rank of the
newcomer, whose other copies are completed within the island.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..channels.channel import ChannelPayload
from ..elastic.agreement import digest
from ..elastic.newcomer import Following
from ..peers.header import PAYLOAD
from ..peers.join_messages import DonorSnapshot, Expected, Listed
from . import snapshot_head
from .first_step import bytes_of, shared_tensors, write_bytes
from .runtime import StepRuntime
from .sending import PendingExchange
from .snapshot_head import DonorPosition, OpenExchange

log = logging.getLogger("fsdp_demo")


# ---- the donor ---------------------------------------------------------------------------------


def hand(
    runtime: StepRuntime,
    model: torch.nn.Module | None,
    told: Mapping[str, Any],
    tells: Callable[[], dict[str, Any]],
) -> None:
    """Copy this rank's state to host memory, and hand it to the donor feed of its peer group. All
    ranks of the island call it together.

    Args:
        model: with the frozen parameters and buffers of the snapshot; None: none.
        told: further facts of the run (`Start.facts`).
        tells: gives what the host of this island tells that of the newcomer.
    """
    (tokens,) = runtime.island.sum(runtime.status.everywhere)
    if (feed := runtime.donor_feed) is None:
        return
    for c in runtime.channels:
        c.state()  # copies to the host may still be under way
    theirs = feed.brings.get("rest")
    same_rest = theirs is not None and theirs == brings(runtime, model).get("rest")
    stand = DonorPosition.of(runtime, same_rest, int(tokens), tells())
    parts = _parts(runtime, model, stand)
    head = snapshot_head.write(runtime, told, stand, [p.listed for p in parts])
    under_way = [f.future for f in runtime.queue.flights if f.future is not None]
    feed.hand(DonorSnapshot(head, {p.name: p.copy() for p in parts}), under_way)


def expected(
    runtime: StepRuntime, model: torch.nn.Module | None, told: Mapping[str, Any], data: Tensor
) -> tuple[DonorPosition, Listed]:
    """The position of a snapshot's donor, and the list of its tensors, from its head `data`, uint8
    [n], which is compared with the run of this rank. Raises ValueError: as `snapshot_head.read`; or
    it lists other tensors than this rank needs.
    """
    head = snapshot_head.read(runtime, told, data)
    mine = [p.listed for p in _parts(runtime, model, head.stand)]
    if mine != (theirs := head.tensors):
        at = next(
            (i for i, part in enumerate(mine) if i >= len(theirs) or theirs[i] != part), len(mine)
        )
        here, there = (every[at] if at < len(every) else None for every in (mine, theirs))
        raise ValueError(
            f"the snapshot lists tensor {at} as {there!r:.80}, this rank needs {here!r:.80}: pass "
            "model= on all islands, or on none"
        )
    return head.stand, mine


# ---- the newcomer ------------------------------------------------------------------------------


def give(
    runtime: StepRuntime,
    model: torch.nn.Module | None,
    stand: DonorPosition,
    tensors: Mapping[str, Tensor],
    following: Following | None,
) -> None:
    """Write a donor's snapshot into this rank's channels, parameters and optimizers. All ranks of
    the island call it together.

    Args:
        stand: the donor's position.
        tensors: of the snapshot. A copy that is not active has none, and is not `following`.
    """
    runtime.go_to(stand.step, begun=-1)
    _give_rest(runtime, model, tensors.get("rest"))
    _give_parameters(runtime, stand, tensors)
    for c in runtime.channels:
        c.start(stand.step)
    for c in runtime.channels:
        if c.channel.source != "delta":
            continue
        for name, work in (("anchor", c.anchor), ("momentum", c.momentum)):
            if work is not None:
                work.copy_(tensors[f"{c.channel.name}.{name}"])
        c.show_anchor()
        c.written = c.pack("parameter") if c.written is not None else None
    runtime.host.commit(model)
    queue = runtime.queue
    flights = [_flight(runtime, i, f, tensors, following) for i, f in enumerate(stand.flights)]
    queue.follow(stand.step, stand.last, stand.applied, flights)
    queue.history.load(stand.history)
    runtime.pace.load(stand.pace)
    if runtime.changes:
        runtime.changes.load(stand.changes)
    queue.watch.loss = queue.watch.loss if stand.loss is None else stand.loss
    queue.norms.load(stand.norms)
    runtime.drop.know(stand.limit)


def brings(runtime: StepRuntime, model: torch.nn.Module | None) -> dict[str, str]:
    """The digest of the frozen parameters (of an adapter's base, say) and buffers of this rank: if
    the donor has the same, they are not fetched."""
    rest = _rest(runtime, model) if runtime.parameters.position.copy == 0 else []
    return {"rest": digest(rest).hex()} if rest else {}


def _give_rest(runtime: StepRuntime, model: torch.nn.Module | None, data: Tensor | None) -> None:
    """Set frozen parameters and buffers from `data`, if any; further copies get the first's."""
    if local := _rest(runtime, model):
        work = bytes_of(local) if data is None else data
        runtime.island.broadcast(work)
        write_bytes(work, local)


def _give_parameters(
    runtime: StepRuntime, stand: DonorPosition, tensors: Mapping[str, Tensor]
) -> None:
    parameters, device = runtime.parameters, runtime.host.device
    sources = [] if _anchored(runtime) else [("parameters", parameters, "parameter")]
    if stand.counts is not None:
        for name in snapshot_head.states(runtime):
            source = f"state:{name}"
            sources.append((f"state.{name}", parameters.of_state(source), source))
        for (_, state), found in zip(snapshot_head.kept(runtime), stand.counts, strict=True):
            for name, value in found.items():
                state[name] = _like(state[name], value)
    elif snapshot_head.moves_states(runtime):
        log.warning("the inner optimizers' states are not handed on: parameters may drift apart")
    for name, laid_out, source in sources:
        work = tensors.get(name)
        laid_out.write(work if work is None else work.to(device), parameters.tensors(source))


def _flight(
    runtime: StepRuntime,
    number: int,
    f: OpenExchange,
    tensors: Mapping[str, Tensor],
    following: Following | None,
) -> PendingExchange:
    """A message under way to which this replica has not contributed; its future gets the answer."""
    by_name = {c.channel.name: c for c in runtime.queue.channels}
    parts = {}
    for name, marks in f.parts.items():
        c, own = by_name[name], tensors.get(own_name(number, name))
        if own is not None:
            own = own.to(runtime.host.device)
        elif c.channel.needs_own and c.layout is not None:
            own = c.layout.new(runtime.host.device)
        parts[name] = ChannelPayload(
            f.step, own=own, present=[m == "1" for m in marks] if c.channel.before_step else None
        )
    queue, worker = runtime.queue, runtime.connections.worker
    layout = queue.layout(f.members, f.step)
    flight = PendingExchange(f.step, list(f.members), parts, layout=layout)
    if worker is not None and following is not None:
        islands = runtime.topology.islands
        wanted = Expected(PAYLOAD, f.step, layout.body_bytes, layout.vectors, islands)
        flight.future = worker.submit(
            partial(queue.sender.pinned, flight, partial(following.arrived, wanted))
        )
    return flight


# ---- what a snapshot holds ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One tensor of a snapshot of this rank: name, dtype, elements, and what reads it."""

    name: str
    dtype: str
    n: int
    read: Callable[[], Tensor | None]

    @property
    def listed(self) -> tuple[str, str, int]:
        """As the head of a snapshot lists it."""
        return self.name, self.dtype, self.n

    def copy(self) -> Tensor:
        """On the host, with memory of its own."""
        found = self.read()
        assert found is not None and found.numel() == self.n, self.name
        return found.detach().to("cpu", copy=True)


def _parts(
    runtime: StepRuntime, model: torch.nn.Module | None, stand: DonorPosition
) -> list[_Part]:
    """The tensors of a snapshot, in their order. Donor and newcomer list them by this function."""
    parameters, rest, out = runtime.parameters, _rest(runtime, model), []
    assert parameters.layout is not None, "a copy that is not active has no peer group"
    whole = parameters.layout.numel

    def add(name: str, n: int, read: Callable[[], Tensor | None], dtype: str = "float32") -> None:
        out.append(_Part(name, dtype, n, read))

    if rest and parameters.position.copy == 0 and not stand.same_rest:
        size = sum(t.numel() * t.element_size() for t in rest)
        add("rest", size, partial(bytes_of, rest), "uint8")
    if not _anchored(runtime):
        add("parameters", whole, partial(parameters.pack, "parameter"))
    for name in snapshot_head.states(runtime) if stand.counts is not None else ():
        of_state = parameters.of_state(state := f"state:{name}")
        assert of_state.layout is not None
        add(f"state.{name}", of_state.layout.numel, partial(of_state.pack, state))
    for c in runtime.channels:
        if c.channel.source == "delta" and c.layout is not None:
            add(f"{c.channel.name}.anchor", c.layout.numel, partial(getattr, c, "anchor"))
            if c.has_momentum(stand.step):
                add(f"{c.channel.name}.momentum", c.layout.numel, partial(getattr, c, "momentum"))
    by_name = {c.channel.name: c for c in runtime.queue.channels}
    for i, f in enumerate(stand.flights):
        for name in f.parts:
            c = by_name[name]
            if c.channel.corrects and c.layout is not None:
                add(own_name(i, name), c.layout.numel, partial(_sent, runtime, i, name))
    return out


def own_name(number: int, name: str) -> str:
    """The name, in a snapshot, of the parameters that the donor sent in message `number`."""
    return f"flight{number}.{name}.own"


def _sent(runtime: StepRuntime, number: int, name: str) -> Tensor | None:
    return runtime.queue.flights[number].parts[name].own


def _rest(runtime: StepRuntime, model: torch.nn.Module | None) -> list[Tensor]:
    """Frozen parameters and buffers."""
    if model is None:
        return []
    return list(shared_tensors(runtime.host, model, runtime.config.own_tensors).values())


def _anchored(runtime: StepRuntime) -> bool:
    """Whether every trained parameter has an anchor, so that the donor's values are not needed."""
    return set(runtime.parameters.covered) <= {
        i for c in runtime.channels if c.channel.source == "delta" for i in c.covered
    }


def count_step(runtime: StepRuntime) -> None:
    """Count a step that was made up for in shared states of inner optimizers that did not step."""
    if snapshot_head.moves_states(runtime) and not runtime.before_step:
        for _, state in snapshot_head.kept(runtime):
            if "step" in state:
                state["step"] = state["step"] + 1


def _like(now: Any, value: float) -> Any:
    return torch.full_like(now, value) if isinstance(now, Tensor) else type(now)(value)
