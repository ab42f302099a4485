"""The state that an island needs to join a run under way: taken by a donor at the end of a step, given to the newcomer.

By source:

    delta       anchor and outer momentum. The newcomer's parameters are the anchor: with the donor's, its steps since would count twice.
                Its accumulator is zero: what the donor has not sent yet is the donor's to send.
    gradient    parameters and optimizer states. The accumulator is zero.
    parameter   parameters; where a mean comes late, what the donor sent for it, since only what changed in between is kept.
    state:NAME  optimizer states.

With them go frozen parameters and buffers, and which messages are under way: what they bring follows, and acts at its own step. Inner
optimizers of the other presets begin anew, as in every take-over. Each rank of the donor hands its own lane and shard to one rank of the
newcomer; ranks of the newcomer beyond the lanes are completed by their island.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..channels.channel import ActiveChannel, Outgoing
from ..comm.digests import digest
from ..comm.header import PAYLOAD
from ..comm.joining import DTYPES, Expected, Following, Listed, Snapshot
from . import snapshot_head
from .in_flight import Flight
from .runtime import Flow
from .snapshot_head import Open, Stand

log = logging.getLogger("fsdp_demo")


# ---- the donor -------------------------------------------------------------------------------------------------------------


def hand(flow: Flow, model: torch.nn.Module | None, told: Mapping[str, Any]) -> None:
    """Take a snapshot of this rank and hand it to its line's desk; or what came since the checkpoint that the newcomer has, where all ranks
    keep it. All ranks of the island call it together."""
    desk = None if flow.line is None else flow.line.desk
    lacks = desk is not None and not desk.hold()
    whole = flow.island.any(lacks)
    if desk is None:
        return
    if whole:
        desk.hand(take(flow, model, told), [f.future for f in flow.mailbox.flights if f.future is not None])
    else:
        desk.hand_since()


def take(flow: Flow, model: torch.nn.Module | None, told: Mapping[str, Any]) -> Snapshot:
    """Copies of this rank's state in host memory.

    Args:
        model: whose frozen parameters and buffers go with it; None: none.
        told: further facts of the run (`Start.facts`).
    """
    for c in flow.channels:
        c.state()  # copies to the host may still be under way
    desk = None if flow.line is None else flow.line.desk
    theirs = desk.brings.get("rest") if desk is not None else None
    stand = Stand.of(flow, counts(flow), same_rest=theirs is not None and theirs == brings(flow, model).get("rest"))
    head = snapshot_head.write(flow, told, stand, states(flow))
    return Snapshot(head, {p.name: p.copy() for p in _parts(flow, model, stand)})


def without_tensors(flow: Flow, told: Mapping[str, Any], own: str) -> Snapshot:
    """One of this step for who has its tensors in a checkpoint with the mark `own`."""
    # What is under way has come, and is in the checkpoint: nobody will hear of it again.
    stand = replace(Stand.of(flow, counts(flow), same_rest=True), own=own, norms=flow.mailbox.norms.state())
    return Snapshot(snapshot_head.write(flow, told, stand, states(flow)), {})


def size(flow: Flow, model: torch.nn.Module | None) -> int:
    """Bytes of the tensors of a snapshot of this rank."""
    return sum(p.n * DTYPES[p.dtype].itemsize for p in _parts(flow, model, Stand.of(flow, counts(flow), same_rest=False)))


def expected(flow: Flow, model: torch.nn.Module | None, told: Mapping[str, Any], head: Mapping[str, Any]) -> tuple[Stand, Listed]:
    """Compare the head of a snapshot with what this rank runs; where its donor stands, and the tensors that are to come.

    Raises:
        ValueError: see `snapshot_head.read`; or it lists other tensors than this rank needs.
    """
    stand = snapshot_head.read(flow, told, head, states(flow), counts(flow))
    mine = [(p.name, p.dtype, p.n) for p in _parts(flow, model, stand)]
    theirs = head.get("tensors")
    if theirs != [list(part) for part in mine]:
        listed = theirs if isinstance(theirs, list) else []
        at = next((i for i, part in enumerate(mine) if i >= len(listed) or listed[i] != list(part)), len(mine))
        here, there = (every[at] if at < len(every) else None for every in (mine, listed))
        raise ValueError(
            f"the snapshot lists tensor {at} as {there!r:.80}, this rank needs {here!r:.80}: pass model= on all islands, or on none"
        )
    return stand, mine


# ---- the newcomer ----------------------------------------------------------------------------------------------------------


def give(flow: Flow, model: torch.nn.Module | None, stand: Stand, tensors: Mapping[str, Tensor], following: Following | None) -> None:
    """Let this rank stand where its donor stood. All ranks of the island call it together.

    Args:
        tensors: of the snapshot; none on a copy beyond the lanes, which has no line and so is not `following`. Where they come from a
            checkpoint (`Stand.own`) model and inner optimizers are filled already.
    """
    flow.step, flow.begun, flow.told = stand.step, -1, stand.host
    if not stand.own:
        _give_rest(flow, model, tensors.get("rest"), stand.same_rest)
        _give_parameters(flow, stand, tensors)
    for c in flow.channels:
        c.start()
    for c in flow.channels:
        if c.channel.source == "delta":
            _give_anchor(c, tensors)
    flow.shards.commit(model)
    mailbox = flow.mailbox
    mailbox.begin(stand.step)
    mailbox.last |= stand.last
    mailbox.applied = dict(stand.applied)
    mailbox.history.load(stand.history)
    mailbox.watch.loss = mailbox.watch.loss if stand.loss is None else stand.loss
    mailbox.norms.load(stand.norms)
    mailbox.flights = [_flight(flow, i, f, tensors, following) for i, f in enumerate(stand.flights)]


def brings(flow: Flow, model: torch.nn.Module | None) -> dict[str, str]:
    """Digests of what a newcomer may hold already: frozen parameters, of an adapter's base say, and buffers."""
    rest = _rest(flow, model) if flow.parameters.position.copy == 0 else []
    return {"rest": digest(rest).hex()} if rest else {}


def _give_rest(flow: Flow, model: torch.nn.Module | None, data: Tensor | None, same: bool) -> None:
    """Frozen parameters and buffers; copies get them from the first of them. same: it has brought them itself."""
    local = _rest(flow, model)
    if not local:
        return
    sizes = [t.numel() * t.element_size() for t in local]
    work = data if data is not None else _bytes(local) if same else torch.empty(sum(sizes), dtype=torch.uint8)
    flow.island.broadcast(work)
    for t, part in zip(local, work.split(sizes), strict=True):
        t.copy_(part.clone().view(t.dtype).view(t.shape))


def _give_parameters(flow: Flow, stand: Stand, tensors: Mapping[str, Tensor]) -> None:
    """Parameters and optimizer states, where they come."""
    parameters, device = flow.parameters, flow.shards.device
    sources = [] if _anchored(flow) else [("parameters", "parameter")]
    if stand.counts is not None:
        sources += [(f"state.{name}", f"state:{name}") for name in states(flow)]
        for (_, state), found in zip(kept(flow), stand.counts, strict=True):
            for name, value in found.items():
                state[name] = _like(state[name], value)
    elif _moves_states(flow):
        log.warning("the inner optimizers' states are not handed on: parameters may drift apart")
    for name, source in sources:
        work = tensors.get(name)
        parameters.write(work if work is None else work.to(device), parameters.tensors(source))


def _give_anchor(c: ActiveChannel, tensors: Mapping[str, Tensor]) -> None:
    for name, work in (("anchor", c.anchor), ("momentum", c.momentum)):  # `returning.KEPT`
        if work is not None:
            work.copy_(tensors[f"{c.channel.name}.{name}"])
    c.show_anchor()
    c.written = c.pack("parameter") if c.written is not None else None


def _flight(flow: Flow, number: int, f: Open, tensors: Mapping[str, Tensor], following: Following | None) -> Flight:
    """A message under way, of which nothing is this replica's own, and what it brings."""
    by_name = {c.channel.name: c for c in flow.mailbox.channels}
    parts = {}
    for name, marks in f.parts.items():
        c, own = by_name[name], tensors.get(own_name(number, name))
        if own is not None:
            own = own.to(flow.shards.device)
        elif c.channel.needs_own and c.layout is not None:
            own = c.layout.new(flow.shards.device)
        parts[name] = Outgoing(f.step, own=own, present=[m == "1" for m in marks] if c.channel.before_step else None)
    mailbox, courier = flow.mailbox, flow.connections.courier
    flight = Flight(f.step, list(f.members), parts, None, layout=mailbox.layout(f.members))
    if courier is not None and following is not None:
        wanted = Expected(PAYLOAD, f.step, flight.layout.body_bytes, flight.layout.vectors, flow.topology.islands)
        flight.future = courier.submit(partial(mailbox.pinned, flight, partial(following.arrived, wanted)))
    return flight


# ---- what it holds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One tensor of a snapshot of this rank: name, dtype, elements, and what reads it."""

    name: str
    dtype: str
    n: int
    read: Callable[[], Tensor | None]

    def copy(self) -> Tensor:
        """On the host, with memory of its own."""
        found = self.read()
        assert found is not None and found.numel() == self.n, self.name
        return found.detach().to("cpu", copy=True)


def _parts(flow: Flow, model: torch.nn.Module | None, stand: Stand) -> list[_Part]:
    """In their order. Both sides list the same by the same function."""
    if stand.own:
        return []
    return [*_of_model(flow, model, stand), *_of_channels(flow), *_of_flights(flow, stand.flights)]


def shared(flow: Flow, model: torch.nn.Module | None) -> list[list[Tensor]]:
    """What `_parts` is made of, in groups, as it lies in memory: what must be equal on all islands if one may stand for another."""
    groups = [_rest(flow, model)]
    if not _anchored(flow):
        groups.append([t for t in flow.shards.read("parameter") if t is not None])
    for name in states(flow):
        groups.append([t for t in flow.shards.read(f"state:{name}") if t is not None])
    for c in flow.channels:
        c.state()  # copies to the host may still be under way
        groups += [[work] for work in (c.anchor, c.momentum) if work is not None]
    for f in flow.mailbox.flights:
        by_name = {c.channel.name: c for c in flow.mailbox.channels}
        groups += [[out.own] for name, out in f.parts.items() if out.own is not None and by_name[name].channel.corrects]
    return groups


def _of_model(flow: Flow, model: torch.nn.Module | None, stand: Stand) -> Iterator[_Part]:
    parameters, rest = flow.parameters, _rest(flow, model)
    assert parameters.layout is not None, "a copy beyond the lanes has no line"
    if rest and parameters.position.copy == 0 and not stand.same_rest:
        yield _Part("rest", "uint8", sum(t.numel() * t.element_size() for t in rest), partial(_bytes, rest))
    if not _anchored(flow):
        yield _Part("parameters", "float32", parameters.layout.numel, partial(parameters.pack, "parameter"))
    if stand.counts is not None:
        for name in states(flow):
            yield _Part(f"state.{name}", "float32", parameters.layout.numel, partial(parameters.pack, f"state:{name}"))


def _of_channels(flow: Flow) -> Iterator[_Part]:
    for c in flow.channels:
        if c.channel.source == "delta" and c.layout is not None:
            yield _Part(f"{c.channel.name}.anchor", "float32", c.layout.numel, partial(getattr, c, "anchor"))
            if c.channel.applier.momentum:
                yield _Part(f"{c.channel.name}.momentum", "float32", c.layout.numel, partial(getattr, c, "momentum"))


def _of_flights(flow: Flow, flights: Sequence[Open]) -> Iterator[_Part]:
    """What the donor sent of its parameters for means that are still to come."""
    by_name = {c.channel.name: c for c in flow.mailbox.channels}
    for i, f in enumerate(flights):
        for name in f.parts:
            c = by_name[name]
            if c.channel.corrects and c.layout is not None:
                yield _Part(own_name(i, name), "float32", c.layout.numel, partial(_sent, flow, i, name))


def own_name(number: int, name: str) -> str:
    """What a snapshot calls what the donor sent of its parameters for message `number` under way."""
    return f"flight{number}.{name}.own"


def _sent(flow: Flow, number: int, name: str) -> Tensor | None:
    return flow.mailbox.flights[number].parts[name].own


def _rest(flow: Flow, model: torch.nn.Module | None) -> list[Tensor]:
    """Frozen parameters and buffers."""
    return [] if model is None else [t for t in flow.shards.rest(model) if t.numel()]


def _bytes(local: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.contiguous().view(-1).view(torch.uint8).cpu() for t in local])


def _anchored(flow: Flow) -> bool:
    """Whether every parameter that is trained has an anchor: its donor's value is not needed then."""
    return set(flow.parameters.covered) <= {i for c in flow.channels if c.channel.source == "delta" for i in c.covered}


def _moves_states(flow: Flow) -> bool:
    """Whether replicas share something of the inner optimizers' states."""
    return bool(flow.before_step) or any(c.channel.state_name for c in flow.channels)


def states(flow: Flow) -> list[str]:
    """Names of the optimizer states that have the shape of their parameters, where replicas share something of them."""
    return flow.shards.states() if _moves_states(flow) else []


def counts(flow: Flow) -> list[dict[str, float]] | None:
    """The numbers in each optimizer state (step counters); None where replicas share nothing of them, or keep what is neither a number nor
    of the shape of its parameter."""
    if not _moves_states(flow):
        return None
    out: list[dict[str, float]] = []
    for p, state in kept(flow):
        rest = {k: v for k, v in state.items() if v is not None and (k == "step" or not isinstance(v, Tensor) or v.shape != p.shape)}
        if not all(isinstance(v, (int, float)) or (isinstance(v, Tensor) and v.numel() == 1) for v in rest.values()):
            return None
        out.append({k: v.item() if isinstance(v, Tensor) else v for k, v in rest.items()})
    return out


def kept(flow: Flow) -> list[tuple[Tensor, dict[str, Any]]]:
    """What the inner optimizers step, with the state of each that holds anything: SGD leaves empty ones behind."""
    return [(p, state) for p, state in flow.shards.optimizer_states() if any(v is not None for v in state.values())]


def count_step(flow: Flow) -> None:
    """The step counters of inner optimizers that have not stepped, where their states are shared: one more step was made up for."""
    if _moves_states(flow) and not flow.before_step:
        for _, state in kept(flow):
            if "step" in state:
                state["step"] = state["step"] + 1


def _like(now: Any, value: float) -> Any:
    return torch.full_like(now, value) if isinstance(now, Tensor) else type(now)(value)
