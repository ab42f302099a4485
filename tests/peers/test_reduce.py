"""The calculations of a reduce against the plain formula, bit for bit, and what they do not do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fsdp_demo.compression import dense
from fsdp_demo.config.parts import CODES
from fsdp_demo.peers import collectives

from ..support.sealed import part_of_mean

LENGTHS = [1, 4095, 3 * 4096 + 5, 300_001]
WEIGHTS = {"equal": [1.0, 1.0, 1.0], "tokens": [3.0, 0.0, 12345.0], "none": [0.0, 0.0, 0.0]}


def vectors(seed: int, codes: Sequence[str]) -> list[tuple[Tensor, str]]:
    made = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, generator=made), code) for n in LENGTHS for code in codes]


def by_the_formula(every: list[list[tuple[Tensor, str]]], weights: list[float]) -> list[Tensor]:
    """Each vector whole: rounded in the parts that travel, added in rank order, divided, rounded
    as it comes back.
    """
    out, size = [], len(every)
    for i, (v, code) in enumerate(every[0]):
        at = dense.cuts(v.numel(), code, size)
        mean = torch.zeros_like(v)
        for a, b in zip(at, at[1:], strict=False):
            for replica, w in zip(every, weights, strict=True):
                if w:
                    part = replica[i][0][a:b]
                    sent = dense.decode(code, dense.encode(code, part), b - a)
                    mean[a:b].add_(sent, alpha=w)
            if sum(weights):
                mean[a:b].div_(sum(weights))
            back = dense.mean_code(code)
            mean[a:b] = dense.decode(back, dense.encode(back, mean[a:b]), b - a)
        out.append(mean)
    return out


@pytest.mark.parametrize("by", ["C", "threads", "torch"])
@pytest.mark.parametrize("codes", [["fp32"], ["bf16"], ["bf16", "fp32"], CODES], ids="-".join)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=list(WEIGHTS))
def test_reduce_means_are_those_of_the_formula(
    codes: Sequence[str], weights: list[float], by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means of a reduce are those of the plain formula, bit for bit, by C, also in several
    threads, and by torch.
    """
    if by == "torch":
        monkeypatch.setattr(collectives, "mean_in_c", None)
    if by == "threads":
        monkeypatch.setattr(collectives, "THREADED", 8)
        monkeypatch.setattr(collectives.os, "sched_getaffinity", lambda pid: range(3))
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    every = [vectors(seed, codes) for seed in range(3)]
    for sent in every:
        sent[-1][0][:5] = -0.0  # the sum of such begins with 0
    if not weights[1]:
        every[1][0][0].fill_(float("nan"))  # who has no share touches nothing
    spans = [(v.numel(), code) for v, code in every[0]]
    coded = []
    for mine in range(3):
        bodies = [
            collectives.own_part(mine_sent, 3, mine)
            if rank == mine
            else collectives.share(mine_sent, 3, mine)
            for rank, mine_sent in enumerate(every)
        ]
        part = part_of_mean(bodies, spans, [weights] * len(spans), mine, 3)
        coded.append(part)
    found = collectives.whole(coded, spans)
    for mine, theirs in zip(found, by_the_formula(every, weights), strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


def test_reduce_own_part_is_rounded_as_sent() -> None:
    """An island's own part is rounded as the others' parts are; in fp32 it is not even copied."""
    sent = vectors(0, CODES)
    for own, (v, code) in zip(collectives.own_part(sent, 3, 1), sent, strict=True):
        at = dense.cuts(v.numel(), code, 3)
        if code == "fp32" and own.numel():  # not even copied
            assert own.data_ptr() == v[at[1] :].data_ptr()
        expected = dense.decode(code, dense.encode(code, v[at[1] : at[2]]), at[2] - at[1])
        assert torch.equal(own.float(), expected)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("lies_at", range(4))
def test_dense_encode_into_writes_in_place(code: str, lies_at: int) -> None:
    """`encode_into` writes the bytes of `encode`, wherever in a message they lie, and nothing
    beside them.
    """
    v = torch.randn(4096 + 77)
    size = dense.num_bytes(code, v.numel())
    room = torch.zeros(size + 8, dtype=torch.uint8)
    data = room[lies_at : lies_at + size]
    dense.encode_into(code, v, data)
    assert torch.equal(data, dense.encode(code, v))
    assert not room[:lies_at].any() and not room[lies_at + size :].any()
    out = torch.empty_like(v)
    dense.decode_into(code, data, out)
    assert torch.equal(out, dense.decode(code, data, v.numel()))
