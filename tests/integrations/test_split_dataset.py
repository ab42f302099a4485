"""`split_dataset_by_island` deals rows and streams to the islands."""

import pytest
import torch
from datasets import Dataset, IterableDataset

from fsdp_demo import Topology
from fsdp_demo.integrations.data import split_dataset_by_island

ISLANDS = [Topology("islands", island=i, islands=3) for i in range(3)]


@pytest.mark.parametrize("make", [
    lambda: Dataset.from_dict({"row": list(range(11))}),
    lambda: [{"row": i} for i in range(11)],
    lambda: torch.utils.data.Subset([{"row": i} for i in range(20)], range(11)),
], ids=["datasets", "list", "torch"])  # fmt: skip
def test_split_dataset_equal_parts(make):
    """`split_dataset_by_island` deals rows in equal parts."""
    parts = [[row["row"] for row in split_dataset_by_island(make(), t)] for t in ISLANDS]
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    whole = make()
    assert split_dataset_by_island(whole, Topology()) is whole
    assert split_dataset_by_island(whole, Topology("mesh", islands=2)) is whole


def test_split_dataset_streams(tmp_path):
    """`split_dataset_by_island` deals the rows of a stream."""

    class Stream(torch.utils.data.IterableDataset):
        epoch = 0

        def __iter__(self):
            return iter(range(self.epoch, self.epoch + 11))

        def set_epoch(self, epoch):
            self.epoch = epoch

    parts = [split_dataset_by_island(Stream(), t) for t in ISLANDS]
    assert [list(p) for p in parts] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    for p in parts:
        p.set_epoch(1)
    assert [list(p)[0] for p in parts] == [1, 2, 3]

    def rows():
        yield from ({"row": i} for i in range(9))

    streams = [split_dataset_by_island(IterableDataset.from_generator(rows), t) for t in ISLANDS]
    assert sorted(row["row"] for s in streams for row in s) == list(range(9))
    with pytest.raises(
        ValueError, match=r"dictionary of splits \(train, test\): give the training split"
    ):
        split_dataset_by_island({"train": [1], "test": [2]}, ISLANDS[0])
    with pytest.raises(ValueError, match="2 rows for 3 islands, which is too few"):
        split_dataset_by_island([1, 2], ISLANDS[0])
