"""Hybrid-sharded training over slow networks: shard inside a node, exchange a little, compressed, between nodes.

    import fsdp_demo
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model)
"""

from .attaching import attach
from .channel_spec import Accumulator, Applier, Channel, Clock, Codec, Fragments, Reducer
from .config import ExchangeConfig
from .errors import Mismatch, NotFinite, PeerLost, Stopped, WireError
from .exchange import Exchange
from .guard import guard
from .inner import base_optimizer
from .link import Link
from .loading import load_config, preset
from .meter import Meter, ring_all_reduce_bytes
from .muon import MuonAdamW
from .presets import half_life_multiples, presets
from .topology import Topology
from .version import __version__

__all__ = [
    "Accumulator",
    "Applier",
    "Channel",
    "Clock",
    "Codec",
    "Exchange",
    "ExchangeConfig",
    "Fragments",
    "Link",
    "Meter",
    "Mismatch",
    "MuonAdamW",
    "NotFinite",
    "PeerLost",
    "Reducer",
    "Stopped",
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
]
