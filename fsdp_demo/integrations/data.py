"""Data for islands: each island gets a part of its own, and whatever runs inside it (Trainer,
Accelerate) splits that among its ranks. Also what a Trainer's batches and rows say.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset

from ..errors import counted
from ..exchange import summary
from ..exchange.exchange import Exchange
from ..rendezvous.topology import Topology

log = logging.getLogger("fsdp_demo")


def split_dataset_by_island(dataset: Any, topology: Topology | None = None) -> Any:
    """This island's part of a training set; the data set itself where there is one replica, or a
    mesh (whose loader splits over all ranks).

    Rows are dealt in turn (island i of n gets rows i, i + n, ...), and all islands get equally
    many, so that an epoch has the same number of steps everywhere: up to n - 1 rows at the end are
    left out. With ISLAND_SLOTS that is n: islands that join later have their parts.

    Args:
        dataset: a `datasets.Dataset` or `IterableDataset`, a torch dataset of either kind, or a
            sequence. Split the training set only: an evaluation set should be the same on every
            island. A `datasets.IterableDataset` is split by
            `datasets.distributed.split_dataset_by_node` (whole files where their number allows):
            train it with `max_steps`.
        topology: default `Topology.from_env()`.

    Raises:
        ValueError: a dictionary of splits; fewer rows than islands; neither a length nor an
            iterator.

    Example:
        >>> from fsdp_demo import Topology
        >>> from fsdp_demo.integrations.data import split_dataset_by_island
        >>> list(split_dataset_by_island([10, 11, 12, 13, 14], Topology(island=1, islands=2)))
        [11, 13]
    """
    topology = topology or Topology.from_env()
    if isinstance(dataset, dict):
        raise ValueError(
            f"found a dictionary of splits ({', '.join(map(str, dataset))}): give the training "
            "split, as dataset['train']"
        )
    if topology.islands == 1 or topology.one_world:
        return dataset
    island, islands = topology.island, topology.islands
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        rows = len(dataset) // islands * islands
        if not rows:
            raise ValueError(
                f"{counted(len(dataset), 'row')} for {islands} islands, which is too few: allowed "
                "is one row per island at least"
            )
        if rows < len(dataset):
            summary.speak(topology)
            text = "%d of %d rows are left out, so that %d islands get equally many"
            log.info(text, len(dataset) - rows, len(dataset), islands)
        mine = range(island, rows, islands)
        return dataset.select(mine) if hasattr(dataset, "select") else Subset(dataset, mine)
    if not isinstance(dataset, Iterable):
        raise ValueError(
            f"{type(dataset).__name__} has neither a length nor an iterator: nothing to split"
        )
    if type(dataset).__module__.split(".")[0] == "datasets":
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(dataset, rank=island, world_size=islands)
    return _Dealt(dataset, island, islands)


class _Dealt(IterableDataset):
    """Every n-th item of an iterable, in whole rounds."""

    def __init__(self, inner: Iterable[Any], island: int, islands: int):
        self.inner, self.island, self.islands = inner, island, islands

    def __iter__(self) -> Iterator[Any]:
        mine = None
        for i, item in enumerate(self.inner):
            if i % self.islands == self.island:
                mine = item
            if i % self.islands == self.islands - 1:
                yield mine

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the inner data set, which may shuffle by it."""
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)


def tokens_in(inputs: Any) -> int:
    """Tokens of a batch: the elements of `input_ids`, else the rows of its first tensor."""
    several = inputs if isinstance(inputs, list | tuple) else [inputs]
    named = inputs if hasattr(inputs, "items") else dict(enumerate(several))
    tensors = {k: v for k, v in named.items() if isinstance(v, torch.Tensor)}
    main = tensors.get("input_ids", next(iter(tensors.values()), None))
    if main is None:
        return 0
    return main.numel() if "input_ids" in tensors or main.ndim == 0 else len(main)


def _first_row(dataset: Any) -> str | None:
    """A checksum of the first row; None where the data set has no rows by number."""
    if not hasattr(dataset, "__getitem__"):
        return None
    try:
        return f"row {zlib.crc32(repr(dataset[0]).encode())}"
    except Exception:  # whatever its rows are like, training does not depend on this
        return None


def warn_of_same_rows(exchange: Exchange, dataset: Any) -> None:
    """Log a warning where two islands were given the same data set, in whatever order. All ranks of
    all islands that begin together call it; those that join later do not.
    """
    topology = exchange.topology
    if not topology.elastic or exchange.newcomer:
        return
    rows = getattr(dataset, "_fingerprint", None) or _first_row(dataset)
    # a word of its own where there is nothing to compare: only what is equal is news
    if exchange.across_islands.any_equal(rows or f"island {topology.island}"):
        exchange.rows_compared()
        log.warning(
            "two islands train on the same rows: give each island its own part: "
            "train_dataset=split_dataset_by_island(dataset) (fsdp_demo.integrations.data)"
        )
