"""What `attach` warns of: what works, and is seldom meant."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch.utils.data import DistributedSampler, Subset

from fsdp_demo import Topology
from fsdp_demo.errors import counted

from . import muon
from .all_ranks import replica

log = logging.getLogger("fsdp_demo")


def warn(engine: Any, topology: Topology, anew: bool) -> None:
    """Log what is seldom meant, once per replica.

    Args:
        anew: nothing of an exchange was given, though `engine.load_checkpoint` could bring it.
    """
    if replica(engine).rank:
        return
    for text in (*_loaded(engine, topology, anew), *_data(engine, topology), *_muon(engine)):
        log.warning("deepspeed_ext.attach found %s", text)


def _loaded(engine: Any, topology: Topology, anew: bool) -> Iterator[str]:
    """A checkpoint that was loaded ahead of `attach`. Whoever begins from a model that was trained
    before does so on purpose.
    """
    if anew and engine.global_steps and topology.islands > 1:
        yield (
            f"an engine at step {engine.global_steps}, and no state of an exchange: parameters "
            "come from one replica, anchors and outer momenta begin anew. To resume a run, call "
            "engine.load_checkpoint(DIR) after attach, not before"
        )


def _data(engine: Any, topology: Topology) -> Iterator[str]:
    """DeepSpeed's own loader deals rows to the ranks of one island: all islands get the same,
    unless each was given its part. Seen where that is a `Subset`, or a selection of `datasets`.
    """
    loader = engine.training_dataloader
    if topology.kind != "islands" or topology.islands == 1:
        return
    if not isinstance(loader, DeepSpeedDataLoader):
        return
    sampler, rows = loader.data_sampler, loader.dataset
    dealt = isinstance(rows, Subset) or getattr(rows, "_indices", None) is not None
    if dealt or type(sampler) is not DistributedSampler or not hasattr(rows, "__len__"):
        return
    if sampler.num_replicas == engine.seq_dp_world_size:
        yield (
            f"training_data of {counted(len(rows), 'row')}, which DeepSpeed deals to the ranks of "
            "this island alone. Unless these are the island's own part, all islands train on the "
            "same rows. A part is what split_dataset_by_island(rows) of "
            "fsdp_demo.integrations.data gives"
        )


def _muon(engine: Any) -> Iterator[str]:
    names = muon.unusual(engine)
    if names:
        yield (
            f"DeepSpeed's Muon at {', '.join(names[:3])}{' ...' * (len(names) > 3)}, which "
            "fsdp_demo leaves to AdamW: embeddings and heads. DeepSpeed goes by names with 'embed' "
            "or 'lm_head': call the module so, or pass a MuonWithAuxAdam with groups of your own"
        )
