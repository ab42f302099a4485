"""The exchange of `fsdp_demo` for DeepSpeed engines at ZeRO-1, 2 and 3.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="zero2.json")
    exchange = deepspeed_ext.attach(engine, "demo")

Channels, codecs, wire, transport, meter and checkpoints are those of `fsdp_demo`; DeepSpeed is
imported here and nowhere else.
"""

from .attaching import attach
from .checkpoints import advance
from .node_mesh import installed, shard_within_node, topology
from .zero_params import ZeroHost

__all__ = ["ZeroHost", "advance", "attach", "installed", "shard_within_node", "topology"]
