"""What an exchange keeps for a run that goes on with it, and what the islands of that run agree on: which messages are sent once more."""

from __future__ import annotations

import logging

from ..comm.agreement import gather_json
from .in_flight import Mailbox
from .runtime import Flow
from .saved_state import ExchangeState

log = logging.getLogger("fsdp_demo")


def state(flow: Flow) -> ExchangeState:
    """See `Exchange.state_dict`."""
    mailbox = flow.mailbox
    in_flight = mailbox.state()
    (tokens, weighed), losses = flow.notes.state()
    return ExchangeState(
        step=flow.step,
        digest=flow.config.digest(),
        channels={c.channel.name: c.state() for c in flow.channels},
        in_flight=in_flight,
        last={c.channel.name: mailbox.last[c.channel.name] for c in flow.channels},
        applied=flow.applied,
        begun=flow.begun,
        tokens=tokens,
        weighed=weighed,
        loss=mailbox.watch.loss,
        losses=losses,
        norms=mailbox.norms.state(),
        history=mailbox.history.note(),
    )


def load(flow: Flow, saved: ExchangeState) -> None:
    """See `Exchange.load_state_dict`."""
    names = [c.channel.name for c in flow.channels]
    if set(saved.channels) != set(names):
        raise ValueError(
            f"saved channels are {sorted(saved.channels)}, this configuration has {names}: resume with the preset that saved them"
        )
    if saved.digest != flow.config.digest():
        log.warning("the state was saved under another configuration (digest %016x, now %016x)", saved.digest, flow.config.digest())
    for c in flow.channels:
        c.load(saved.channels[c.channel.name])
    flow.step, flow.begun = max(flow.step, saved.step), saved.begun
    flow.mailbox.load(saved.in_flight, saved.last, saved.applied)
    flow.mailbox.watch.loss = saved.loss
    flow.mailbox.norms.load(saved.norms)
    flow.mailbox.history.load(saved.history)
    flow.notes.load(saved.tokens, saved.weighed, saved.losses, flow.shards.device)


def forget(flow: Flow) -> None:
    """Wait for what is under way, and drop it with what was noted and found so far."""
    flow.mailbox.clear()
    if flow.line is not None and flow.line.desk is not None:
        flow.line.desk.forget()
    flow.notes.clear()
    flow.drift, flow.begun = None, -1
    for c in flow.channels:
        c.present = [False] * len(c.covered)


def agree_on_norms(mailbox: Mailbox, donor: int) -> None:
    """What the donor remembers of the norms in messages is what all do: they must leave out the same."""
    line = mailbox.connections.line
    if line is not None and line.size > 1:
        mailbox.norms.load(gather_json(line, mailbox.norms.state() if line.rank == donor else {})[donor])


def agree(mailbox: Mailbox, step: int, donor: int) -> None:
    """What was under way when a state was saved is to be sent once more (`Mailbox.send_again`), where not all islands have received it.
    What some have and others will not send is dropped. All count from one last exchange, and have the donor's history.

    Islands may stand at unlike steps between the same exchanges: who is behind sends at its own time what the others send again now.

    Raises:
        ValueError: something is dropped, and islands stand at unlike steps.
    """
    line, island, flights = mailbox.connections.line, mailbox.connections.island, mailbox.flights
    open_here = [[f.step, f.members, f.arrived is not None] for f in flights]
    mine = {"step": step, "flights": open_here, "history": mailbox.history.note()}
    everyone = gather_json(line, mine) if line is not None else []
    if everyone:
        mailbox.history.load(everyone[donor]["history"])
    theirs = [{(s, *members): here for s, members, here in each["flights"]} for each in everyone]
    known = {key for held in theirs for key in held}
    lost = any(key not in held and key[0] < each["step"] for each, held in zip(everyone, theirs, strict=True) for key in known)
    again = [line is not None and not all(held.get((f.step, *f.members)) for held in theirs) for f in flights]
    lost |= any(f.members != list(f.parts) for f, wanted in zip(flights, again, strict=True) if wanted)  # a part has acted here
    dropped, *repeat = island.largest(float(lost), *map(float, again))
    if dropped:
        _drop(mailbox, apart=island.any(len({each["step"] for each in everyone}) > 1))
    own = [mailbox.last[c.channel.name] for c in mailbox.channels]
    first = [min(column) for column in zip(*gather_json(line, own), strict=True)] if line is not None else own
    common = island.largest(*(-v for v in first))  # the least of all ranks
    mailbox.last = {c.channel.name: -int(v) for c, v in zip(mailbox.channels, common, strict=True)}
    mailbox.unsent = [flight for flight, wanted in zip(mailbox.flights, repeat, strict=False) if wanted]


def _drop(mailbox: Mailbox, apart: bool) -> None:
    """Forget what is under way, as if it had not been sent. apart: islands stand at unlike steps, so nothing can be dropped."""
    if apart:
        raise ValueError(
            "islands resume at unlike steps, and not all hold what was under way: resume all from a checkpoint of one step "
            "(fsdp-demo inspect shows them)"
        )
    if mailbox.flights:
        steps = [f.step for f in mailbox.flights]
        log.warning("payloads of steps %s were under way when the state was saved, not all islands have them: dropped", steps)
    for flight in mailbox.flights:
        for c in [c for c in mailbox.channels if c.channel.name in flight.parts]:
            c.undo(flight.parts[c.channel.name])
            mailbox.last[c.channel.name] = -1
    mailbox.flights.clear()
