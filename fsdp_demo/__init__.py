"""Hybrid-sharded training over slow networks: shard inside a node, exchange a little, compressed,
between nodes.

import fsdp_demo
exchange = fsdp_demo.attach(optimizer, "diloco", model=model)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .attaching import attach
    from .config.channel import Channel, Phase
    from .config.load import load_config, preset
    from .config.methods import presets
    from .config.parts import (
        Accumulator,
        Applier,
        Codec,
        Drop,
        Fragments,
        Reducer,
        SyncSchedule,
    )
    from .config.schema import ExchangeConfig
    from .errors import Mismatch, NeedsDecision, NotFinite, PeerLost, Stopped, WireError
    from .exchange.exchange import Exchange
    from .exchange.guard import guard, undecided
    from .hosts.lowrank import LowRankAdamW
    from .hosts.muon import MuonAdamW
    from .hosts.optimizers import base_optimizer
    from .hosts.qhadamw import QHAdamW
    from .net.link import Link
    from .peers.header import Meter, ring_all_reduce_bytes
    from .rendezvous.topology import Topology

__all__ = [
    "Accumulator",
    "Applier",
    "Channel",
    "Codec",
    "Drop",
    "Exchange",
    "ExchangeConfig",
    "Fragments",
    "Link",
    "LowRankAdamW",
    "Meter",
    "Mismatch",
    "MuonAdamW",
    "NeedsDecision",
    "NotFinite",
    "PeerLost",
    "Phase",
    "QHAdamW",
    "Reducer",
    "Stopped",
    "SyncSchedule",
    "Topology",
    "WireError",
    "__version__",
    "attach",
    "base_optimizer",
    "guard",
    "load_config",
    "preset",
    "presets",
    "ring_all_reduce_bytes",
    "undecided",
]

# Imported late: commands that need no torch (a durable store, a rehearsal, `fsdp-demo presets`) do
# not wait seconds for it.
_HOMES = {
    "attaching": ("attach",),
    "net.link": ("Link",),
    "peers.header": ("Meter", "ring_all_reduce_bytes"),
    "rendezvous.topology": ("Topology",),
    "config.channel": ("Channel", "Phase"),
    "config.load": ("load_config", "preset"),
    "config.parts": (
        *("Accumulator", "Applier", "Codec", "Drop", "Fragments", "Reducer", "SyncSchedule"),
    ),
    "config.methods": ("presets",),
    "config.schema": ("ExchangeConfig",),
    "errors": ("Mismatch", "NeedsDecision", "NotFinite", "PeerLost", "Stopped", "WireError"),
    "exchange.exchange": ("Exchange",),
    "exchange.guard": ("guard", "undecided"),
    "hosts.lowrank": ("LowRankAdamW",),
    "hosts.muon": ("MuonAdamW",),
    "hosts.optimizers": ("base_optimizer",),
    "hosts.qhadamw": ("QHAdamW",),
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first asked for (PEP 562)."""
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(f".{home}", __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
