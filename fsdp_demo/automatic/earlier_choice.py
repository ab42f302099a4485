"""The method that `auto` has chosen when this run began, and the steps at which phases begin: they
stand in a state to resume from, and in the store.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from typing import Any

from ..config.auto import AutoChoice, method_note, undecided
from ..config.schema import ExchangeConfig
from ..errors import PeerLost
from ..peers.votes import Ranks
from ..rendezvous import attempts
from ..rendezvous.topology import Topology
from ..store.client import Store

log = logging.getLogger("fsdp_demo")

KEY = "auto"
"""Below the run's prefix in the store."""

_begins = itertools.count()  # of this process: each `attach` has keys of its own


def remembered(
    topology: Topology, state: Any, island: Ranks
) -> tuple[ExchangeConfig | None, AutoChoice | None]:
    """The configuration that this run goes on with and, where `auto` has chosen it, why; None and
    None where the run has not begun. island: the ranks of this island, which call it together.
    """
    known = known_choice(topology, state, island)
    if topology.elastic and not _under_way(topology):
        # one that takes over from the others has no state that says it
        told = island.from_first(lambda: _together(topology, known))
        known = known or read(told)
    if known is None:
        return None, None
    if topology.rank == 0:
        log.info("this run began with %s", known[0].describe())
    return known


def known_choice(
    topology: Topology, state: Any, island: Ranks
) -> tuple[ExchangeConfig, AutoChoice | None] | None:
    """The method of the run, and why, if `auto` has chosen it: the store says so, where the run is
    under way, else the state to resume from. None where it is still to be chosen, or the store is
    silent.

    Rank 0 looks into the store and tells the others: it may change while they look.

    Raises:
        ValueError: a state from which that cannot be read.
    """
    told: Mapping[str, Any] = {}
    if topology.elastic and _under_way(topology):
        told = island.from_first(lambda: _in_store(topology))
    elif isinstance(state, Mapping):
        if "config" not in state:
            raise ValueError(
                "attach(state=...) with a method that is settled when a run begins (auto, or "
                "phases that begin at a share of it): this state does not say it. Give what "
                "Exchange.state_dict gave, or name the method it was saved under"
            )
        told = state
    elif heads := getattr(state, "heads", None):
        told = heads[0]
    return read(told)


def read(told: Mapping[str, Any]) -> tuple[ExchangeConfig, AutoChoice | None] | None:
    """Configuration and choice from a `method_note`; None where `auto` has not chosen yet."""
    if "config" not in told:
        return None
    config, choice = ExchangeConfig.from_dict(told["config"]), told.get("auto_choice")
    return None if undecided(config) else (config, AutoChoice(**choice) if choice else None)


def _under_way(topology: Topology) -> bool:
    """Whether the run is under way, alike on all ranks of the island; False if no store answers."""
    try:
        return topology.under_way()
    except PeerLost:
        return False


def _in_store(topology: Topology) -> Any:
    """The `method_note` in the store; {} if there is none, or if the store does not answer."""
    try:
        store = topology.open_store(topology.question)
        key = f"{topology.prefix()}/{KEY}"
        return store.note(key, "the run's choice", dict[str, Any]) if store.get(key) else {}
    except PeerLost:
        return {}


def _together(
    topology: Topology, known: tuple[ExchangeConfig, AutoChoice | None] | None
) -> dict[str, Any]:
    """Exchange with the other islands that begin the `method_note` that each goes on with; returns
    the first that is not empty, {} where none of them has chosen, or where one does not come: the
    meeting of the islands, right behind this, names it.
    """
    own = {} if known is None else method_note(*known)
    name = f"{topology.prefix()}/{KEY}-begin{next(_begins)}"
    try:
        store = topology.open_store(topology.question)
        store.set(f"{name}/{topology.island}", json.dumps(own))
        notes = store.gather(
            name,
            topology.starters,
            dict[str, Any],
            topology.timeout,
            "the methods of the islands",
            look=lambda notes, missing: [] if any(notes.values()) else missing,
        )
    except PeerLost:
        return {}
    return next((told for told in notes.values() if told), {})


def tell(topology: Topology, config: ExchangeConfig, choice: AutoChoice | None = None) -> None:
    """Put into the store what this run began with, for islands that join later; on the first rank.
    A store that is silent now gets it when it answers again: this run can do without.
    """
    if topology.rank != 0 or not topology.elastic:
        return
    pulse, text = attempts.join(topology), json.dumps(method_note(config, choice))

    def put(at: Store) -> None:
        at.set(KEY, text)
        pulse.no_more(put)

    if not pulse.ask(put, pulse.deadline):
        pulse.every(put)
