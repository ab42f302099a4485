"""The study's trial of owners of blocks in a sparse exchange."""

import dataclasses

import pytest
import torch

from fsdp_demo.channels import appliers  # noqa: E402
from fsdp_demo.config.parts import BLOCK  # noqa: E402
from study import owners as study_owners  # noqa: E402

from .test_study import SHORT, Cell, Run, as_threads


@pytest.fixture(autouse=True)
def own_appliers(monkeypatch):
    """What the trial registers ends with its test."""
    monkeypatch.setattr(appliers, "APPLIERS", dict(appliers.APPLIERS))


@pytest.mark.parametrize("kept", [None, 0.6])
def test_study_owners_send_the_largest_sums_back(kept):
    """Owners send the largest sums back, as written out place by place for one block of three
    replicas.
    """
    generator = torch.Generator().manual_seed(0)
    places = torch.cat([torch.randperm(BLOCK, generator=generator)[:40] for _ in range(3)])
    places[40:60], places[90:100] = places[:20], places[:10]  # some are sent by two or three
    values = torch.randn(120, generator=generator)
    left = None if kept is None else torch.randn(BLOCK, generator=generator)
    found = study_owners.sent_back(places[None], values[None], 8, "1bit", _row(left))

    sums = [0.0] * BLOCK if left is None else left.tolist()
    senders = [0] * BLOCK
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        sums[place] += value
        senders[place] += 1
    largest = sorted(sorted(range(BLOCK), key=lambda p: -abs(sums[p]))[:8])
    means = [sums[p] / max(1, senders[p]) for p in largest]
    scale = torch.tensor(sum(map(abs, means)) / 8).bfloat16().item()
    sent = [scale if mean > 0 else -scale for mean in means]
    for p, value in zip(largest, sent, strict=True):
        sums[p] -= value * max(1, senders[p])
    for got, expected in zip(found, (largest, sent, sums), strict=True):
        torch.testing.assert_close(got[0].float(), torch.tensor(expected).float())


def _row(left):
    return None if left is None else left[None]


def test_study_owners_that_send_all_back_change_nothing(run_ranks):
    """Owners that send all back change nothing, nor does what they keep, since it is nothing; with
    fewer values it is another run.
    """
    plain = Cell("gather", "sign_loco", {"period": 2, "topk": 32, "value_dtype": "fp32"})
    cells = [dataclasses.replace(plain, owners=o) for o in (None, (BLOCK, 0.0), (BLOCK, 0.6))]
    few = dataclasses.replace(plain, owners=(32, 0.6))

    def ends(rank):
        return [as_threads(rank, cell) for cell in (*cells, few)]

    ((gathered, all_back, kept, some),) = run_ranks(ends, 1, 1)
    assert all_back["loss"] == gathered["loss"] == kept["loss"] != some["loss"]
    assert some["equal_at_end"] is True
    keys = [Run(cell, SHORT, 0).key("v") for cell in (*cells, few)]
    assert len(set(keys)) == 4


@pytest.mark.parametrize(("replicas", "back", "share"), [(4, 90, 0.5), (16, 90, 0.125)])
def test_study_owners_bytes(replicas, back, share):
    """The bytes of owners: as many values there and back are 2 (R - 1) / R payloads in place of R -
    1.
    """
    cell = Cell("owners", "sign_loco", {"topk": 90}, replicas=replicas, owners=(back, 0.0))
    shapes = [("weight", (256, 256))]
    assert study_owners.share_of_gather(cell.config(), shapes, replicas) == share
    result = {"bytes_sent": 1000, "curve": {"bytes": [500.0, 1000.0]}}
    model = torch.nn.Linear(256, 256, bias=False)
    found = study_owners.recounted(result, cell.config(), replicas, model)
    assert found["bytes_sent"] == 1000 * share and found["bytes_gathered"] == 1000
    assert found["curve"]["bytes"] == [500 * share, 1000 * share]


def test_study_owners_more_values_back_cost_more():
    """More values back cost more bytes."""
    cell = Cell("owners", "sign_loco", {"topk": 90}, replicas=4, owners=(360, 0.0))
    share = study_owners.share_of_gather(cell.config(), [("weight", (256, 256))], 4)
    assert 0.9 < share < 1.25  # (1 + 3 to 4) / 4
