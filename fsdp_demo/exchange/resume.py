"""The saved state of an exchange, taken and restored, and the agreement of the islands that resume:
which messages are sent once more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..elastic.agreement import gather_json
from .in_flight import InFlightQueue
from .runtime import StepRuntime
from .saved_state import ExchangeState
from .sending import PendingExchange

log = logging.getLogger("fsdp_demo")


def state(runtime: StepRuntime) -> ExchangeState:
    """The state of this rank, for `Exchange.state_dict`."""
    queue = runtime.queue
    in_flight = queue.state()
    return ExchangeState(
        step=runtime.step,
        digest=runtime.config.digest(),
        channels={c.channel.name: c.state() for c in runtime.channels},
        in_flight=in_flight,
        last={c.channel.name: queue.last[c.channel.name] for c in runtime.channels},
        applied=runtime.applied,
        begun=runtime.begun,
        loss=queue.watch.loss,
        norms=queue.norms.state(),
        history=queue.history.note(),
        pace=runtime.pace.state(),
        limit=runtime.drop.chosen,
        changes=runtime.changes.state() if runtime.changes else {},
        **runtime.status.state(),
    )


def roll_back(runtime: StepRuntime, saved: ExchangeState) -> None:
    """Take a run back to a saved state (`Exchange.load_state_dict`). All ranks of the island call
    it together. Messages under way are waited for and dropped. Raises ValueError: the state has
    other channels, or messages that never came back.
    """
    check(runtime, saved)
    if runtime.peers is not None and any(s.arrived is None for s in saved.in_flight):
        raise ValueError(
            f"the state of step {saved.step} has messages under way that never came back, since "
            "an island was lost: detach(), and attach(state=...) sends them once more"
        )
    if saved.step != runtime.step or runtime.queue.flights:
        runtime.check_usable()
        forget(runtime)
    load(runtime, saved)


def check(runtime: StepRuntime, saved: ExchangeState) -> None:
    """Raise ValueError if a state has other channels."""
    names = [c.channel.name for c in runtime.channels]
    if set(saved.channels) != set(names):
        raise ValueError(
            f"saved channels are {sorted(saved.channels)}, this configuration has {names}: resume "
            "with the preset that saved them"
        )


def load(runtime: StepRuntime, saved: ExchangeState) -> None:
    """Restore a state with its step, where nothing is under way."""
    check(runtime, saved)
    if saved.digest != runtime.config.digest():
        text = "the state was saved under another configuration (digest %016x, now %016x)"
        log.warning(text, saved.digest, runtime.config.digest())
    for c in runtime.channels:
        c.load(saved.channels[c.channel.name], saved.step)
    runtime.go_to(saved.step, saved.begun)
    runtime.rewritten.forget()
    runtime.queue.load(saved.in_flight, saved.last, saved.applied)
    runtime.queue.watch.loss = saved.loss
    runtime.queue.norms.load(saved.norms)
    runtime.queue.history.load(saved.history)
    runtime.pace.load(saved.pace)
    if runtime.changes:
        runtime.changes.load(saved.changes)
    runtime.status.load(saved, runtime.host.device)
    runtime.drop.know(saved.limit)


def forget(runtime: StepRuntime) -> None:
    """Wait for the messages under way, and drop them with the counts and losses so far."""
    runtime.queue.clear()
    runtime.status.clear()
    runtime.note_drift(None)
    runtime.pace.clear()
    if runtime.changes:
        runtime.changes.clear()
    runtime.go_to(runtime.step, begun=-1)
    for c in runtime.channels:
        c.present = [False] * len(c.covered)


def agree_on_norms(queue: InFlightQueue, donor: int) -> None:
    """Give all islands the donor's norms of the last messages: they must leave out the same."""
    peers = queue.connections.peers
    if peers is not None and peers.size > 1:
        queue.norms.load(
            gather_json(peers, queue.norms.state() if peers.rank == donor else {})[donor]
        )


def agree(runtime: StepRuntime, donor: int) -> None:
    """Agree on the messages under way when the states were saved. Those that not all islands have
    received are sent once more (`InFlightQueue.send_again`); if an island lacks one that it should
    have sent, all are dropped. All islands get the donor's history and, but for what is sent once
    more, one last exchange; one without a count of tokens gets that of the donor.

    Islands may stand at unlike steps between the same exchanges: one that is behind sends its part
    when it comes to the step.

    Raises:
        ValueError: messages are dropped, and islands stand at unlike steps.
    """
    queue, island, peers, status = runtime.queue, runtime.island, runtime.peers, runtime.status
    flights, counted = queue.flights, island.sum(status.everywhere)[0]
    open_here = [[f.step, f.members, f.arrived is not None] for f in flights]
    note = queue.history.note()
    mine = {"step": runtime.step, "flights": open_here, "history": note, "tokens": counted}
    mine["limit"] = runtime.drop.chosen
    everyone = gather_json(peers, mine) if peers is not None else []
    if everyone:
        queue.history.load(everyone[donor]["history"])
    lost, again = _to_send_again(flights, everyone)
    heard = [everyone[donor][key] for key in ("tokens", "limit")] if everyone else [0.0, 0.0]
    dropped, tokens, limit, *repeat = island.max(float(lost), *heard, *map(float, again))
    runtime.drop.know(limit)
    if not counted and island.rank == 0:
        status.settled = int(tokens)
    if dropped:
        _drop(queue, apart=island.any(len({each["step"] for each in everyone}) > 1))
    names = [c.channel.name for c in queue.channels]
    own = [queue.last[name] for name in names]
    rows = [own] if peers is None else gather_json(peers, own)
    common = island.max(*(-min(v) for v in zip(*rows, strict=True)))  # the least of all ranks
    unsent = [flight for flight, wanted in zip(queue.flights, repeat, strict=False) if wanted]
    # who is behind comes to the steps of these, also to the end of the run, and sends its part then
    sent = {name for flight in unsent for name in flight.parts}
    queue.agree_on(
        {n: queue.last[n] if n in sent else -int(v) for n, v in zip(names, common, strict=True)},
        unsent,
    )


def _to_send_again(
    flights: Sequence[PendingExchange], everyone: Sequence[Mapping[str, Any]]
) -> tuple[bool, list[bool]]:
    """Whether an island lacks its own message or part of it, and which `flights` not all have."""
    theirs = [{(s, *members): here for s, members, here in each["flights"]} for each in everyone]
    known = {key for held in theirs for key in held}
    lost = any(
        key not in held and key[0] < each["step"]
        for each, held in zip(everyone, theirs, strict=True)
        for key in known
    )
    again = [not all(held.get((f.step, *f.members)) for held in theirs) for f in flights]
    acted = [f.members != list(f.parts) for f in flights]
    return lost or any(a and b for a, b in zip(acted, again, strict=True)), again


def _drop(queue: InFlightQueue, apart: bool) -> None:
    """Drop the messages under way, as if never sent; refused at unlike steps (`apart`)."""
    if apart:
        raise ValueError(
            "islands resume at unlike steps, and not all hold what was under way: resume all from "
            "a checkpoint of one step (fsdp-demo inspect shows them)"
        )
    if queue.flights:
        steps = [f.step + 1 for f in queue.flights]
        log.warning(
            "payloads of steps %s were under way when the state was saved, not all islands have "
            "them: dropped",
            steps,
        )
    for flight in queue.flights:
        for c in [c for c in queue.channels if c.channel.name in flight.parts]:
            if not flight.late:
                c.undo(flight.parts[c.channel.name])
            queue.last[c.channel.name] = -1
    queue.flights.clear()
