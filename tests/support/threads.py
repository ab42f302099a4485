"""A process may fork only while it has one thread: of several, only the one that forks goes on in
the child.

A lock that another thread held at that moment stays locked in the child, and an allocator's
background thread is missing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from pathlib import Path

# What torch imports at the first optimizer or fully_shard: once before the first fork, instead of
# 0.8 s in every rank.
LAZY = (
    "torch._dynamo", "torch._dynamo.device_interface", "torch.distributed.fsdp",
    "torch.distributed.tensor",
)  # fmt: skip
# What a library imports when it is first used: half of a short run's time.
LATE = {
    "fsdp_demo": ("encodings.idna", "fsdp_demo.attaching", "fsdp_demo.elastic.connect",
        "fsdp_demo.peers.zeromq", "fsdp_demo.exchange.guard", "fsdp_demo.store.server"),
    "transformers": ("transformers.models.auto.modeling_auto",
        "transformers.models.llama.modeling_llama"),
    "accelerate": ("deepspeed",),
    "deepspeed": ("deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.runtime.superoffload.superoffload_stage3"),
}  # fmt: skip


def names() -> list[str]:
    """The threads of this process, also those that Python does not know (Linux); elsewhere those
    that it knows.
    """
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return [thread.name for thread in threading.enumerate()]
    found = []
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # ended meanwhile
            found.append((int(task.name), (task / "comm").read_text().strip()))
    return [name for _, name in sorted(found)]  # the first thread first


def assert_one(who: str) -> None:
    """Raises AssertionError, with the names of the others, if this process has more than one
    thread.
    """
    found = names()
    assert len(found) == 1, (
        f"{who} forks with {len(found)} threads, besides its own: {', '.join(found[1:])}. A child "
        "has only the one that forks, and "
        "the locks of the others as they were. Find what started them: an import, a DataLoader, a "
        "process group, a TCPStore"
    )


def preload() -> None:
    """Import what is there and the modules imported so far import late, once instead of in every
    rank. What a module of tests would do in each of its ranks, and may do once, is its
    `before_ranks`, called before each run of ranks from the first on that it takes part in.
    """
    for name, others in LATE.items():
        for other in others if name in sys.modules else ():
            # not installed, or another version of it
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(other)
    if "fsdp_demo.attaching" in sys.modules:
        _code_once()
    if "transformers" in sys.modules:
        _names_once()
    if "accelerate" in sys.modules:
        _packages_once()
    for name, module in [*sys.modules.items()]:
        if name.startswith("tests.") and hasattr(module, "before_ranks"):
            module.before_ranks()


@functools.cache
def _names_once() -> None:
    """Make transformers' table of renamed weights, which a rank would make for 0.13 s at the first
    model that it saves or loads. A version without that table makes it at the first use.
    """
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


@functools.cache
def _packages_once() -> None:
    """Accelerate reads the metadata of packages again and again to know whether they are there."""
    from accelerate.utils import imports

    imports._is_package_available = functools.cache(imports._is_package_available)
    for known in (imports.is_datasets_available, imports.is_deepspeed_available):
        known()


@functools.cache
def _code_once() -> None:
    """Make the tables of compression, and read the types of a configuration: a rank of a short run
    would do so for as long as it trains.
    """
    from fsdp_demo import preset
    from fsdp_demo.compression import sparse
    from fsdp_demo.compression.blocks import Layout
    from fsdp_demo.compression.transform import transform

    from .sections import decode_sparse

    codec, layout = preset("demo").channels[0].codec, Layout([(64, 64)], ["transform"])
    work = transform(codec, layout, layout.new("cpu"))
    decode_sparse(layout, codec, sparse.encode_sparse(layout, codec, work))


@functools.cache
def warm() -> None:
    """Do once, on one thread, what torch prepares at its first use: two threads that were first at
    once have crashed in it. A rank is forked from a server that has done it.
    """
    import torch

    for module in LAZY:
        importlib.import_module(module)
    torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    torch.topk(torch.ones(8), 2)
    _shard_once()
    torch.fft.rfft(torch.ones(8))


def _shard_once() -> None:
    """A step of FSDP2 in a world of this process alone: its first use takes a third of a second in
    a rank.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    # Sizes that no test has: for each shape torch keeps the mesh it met first, and this one knows
    # rank 0 only. With it rank 1 took its shard of a tensor for the first.
    model = torch.nn.Sequential(torch.nn.Linear(23, 29), torch.nn.LayerNorm(29))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 23)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    dist.destroy_process_group()
