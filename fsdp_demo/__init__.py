"""Hybrid-sharded training over slow networks: shard inside a node, exchange a little, compressed, between nodes.

import fsdp_demo
exchange = fsdp_demo.attach(optimizer, "diloco", model=model)
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from .attaching import attach
from .comm.link import Link
from .comm.meter import Meter, ring_all_reduce_bytes
from .comm.topology import Topology
from .config.channel import Accumulator, Applier, Channel, Codec, Fragments, Reducer, SyncSchedule
from .config.load import load_config, preset
from .config.presets import half_life_multiples, presets
from .config.schema import ExchangeConfig
from .errors import Mismatch, NeedsDecision, NotFinite, PeerLost, Stopped, WireError
from .errors import renamed as _renamed
from .exchange.exchange import Exchange
from .exchange.guard import guard, undecided
from .hosts.muon import MuonAdamW
from .hosts.optimizers import base_optimizer
from .version import __version__

__all__ = [
    "Accumulator",
    "Applier",
    "Channel",
    "Codec",
    "Exchange",
    "ExchangeConfig",
    "Fragments",
    "Link",
    "Meter",
    "Mismatch",
    "MuonAdamW",
    "NeedsDecision",
    "NotFinite",
    "PeerLost",
    "Reducer",
    "Stopped",
    "SyncSchedule",
    "Topology",
    "WireError",
    "__version__",
    "attach",
    "base_optimizer",
    "guard",
    "half_life_multiples",
    "load_config",
    "preset",
    "presets",
    "ring_all_reduce_bytes",
    "undecided",
]

if not _TYPE_CHECKING:

    def __getattr__(name: str):
        raise _renamed("fsdp_demo", name, {"Clock": "SyncSchedule"})
