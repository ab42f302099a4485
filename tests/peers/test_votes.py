"""Words between the ranks of a replica: the same answer and the same kind of error on all of them,
without pickles.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_demo.errors import NeedsDecision, NotFinite, PeerLost, StoreSilent, Superseded
from fsdp_demo.peers.votes import Ranks
from fsdp_demo.rendezvous.island import IslandGroup

from ..support.inside import in_ranks

ROOT = Path(__file__).parents[2]


def words(me: Any) -> list[Any]:
    ranks = Ranks.everywhere()
    said = [
        ranks.max(me.proc, -me.proc),
        ranks.sum(1, me.proc),
        ranks.any(me.proc == 1),
        ranks.any(False),
    ]
    said += [
        ranks.same(7),
        ranks.same(me.proc),
        ranks.everyone({"rank": me.proc, "text": "é" * me.proc}),
        ranks.everyone(None),
    ]
    return [
        *said,
        ranks.from_first(lambda: ("only", me.proc, "ü")),
        ranks.together(lambda: me.proc, "work"),
    ]


def test_ranks_all_hear_the_same(run_ranks: Any) -> None:
    """All ranks of a replica get the same answer of each call."""
    out = run_ranks(words, islands=1, procs=3)
    everyone = [{"rank": r, "text": "é" * r} for r in range(3)]
    for r, said in enumerate(out):
        heard = [everyone, [None] * 3, ["only", 0, "ü"], r]
        assert said == [[2, 0], [3, 3], True, False, True, False, *heard]


def test_ranks_alone_needs_no_group() -> None:
    """A rank alone answers itself, without a process group."""
    alone = Ranks.everywhere()
    assert (alone.group, alone.rank, alone.world) == (None, 0, 1)
    assert alone.max(2, 1) == [2, 1] and alone.same(3) and not alone.any(False)
    assert alone.everyone("x") == ["x"]
    assert alone.from_first(lambda: 5) == 5 and isinstance(alone, Ranks)
    assert issubclass(IslandGroup, Ranks)


def errors(
    me: Any, asked: list[Exception], worked: list[list[Exception | None]]
) -> list[tuple[str, str]]:
    """Kind and text of what each call raised."""
    ranks, found = Ranks.everywhere(), []

    def fail(error: Exception | None) -> None:
        if error is not None:
            raise error

    for call in (
        *(lambda e=error: ranks.from_first(lambda: fail(e)) for error in asked),
        *(lambda e=pair[me.proc]: ranks.together(lambda: fail(e), "work") for pair in worked),
    ):
        with pytest.raises(Exception) as caught:  # noqa: B017, PT011
            call()
        found.append((type(caught.value).__name__, str(caught.value)))
    return found


def test_ranks_raise_the_error_of_one_on_all(run_ranks: Any) -> None:
    """An error of one rank is raised on all ranks, with the same kind where the library knows
    it.
    """
    kinds = [NeedsDecision, StoreSilent, Superseded, PeerLost, ValueError, RuntimeError, KeyError]
    asked = [kind(text) for kind, text in zip(kinds, "abcdefg", strict=True)]
    full, lost, odd = OSError(28, "No space left"), PeerLost("i"), KeyError("k")
    worked = [
        [ValueError("h"), None],
        [None, full],
        [full, lost],
        [NotFinite("j"), full],
        [odd, full],
    ]
    first, second = run_ranks(errors, islands=1, procs=2, args=(asked, worked))
    common = [kind.__name__ for kind in kinds[:6]]
    here = ["KeyError", "ValueError", "OSError", "PeerLost", "OSError", "KeyError"]
    there = ["RuntimeError", "RuntimeError", "OSError", "PeerLost", "OSError", "RuntimeError"]
    assert [kind for kind, _ in first] == [*common, *here]
    assert [kind for kind, _ in second] == [*common, *there]
    assert [text for _, text in second[:6]] == list("abcdef")
    assert second[7][1] == "work: another rank failed"
    assert first[8][1] == "work: another rank could not write"
    assert first[9][1] == "work: another rank lost its peer"


@in_ranks(1, 2)
def test_ranks_use_a_device_that_the_group_reaches(me: Any) -> None:
    """Words travel on the host where the group reaches it, and else on its device."""

    def place() -> str:
        return str(Ranks(dist.group.WORLD, me.proc, 2, torch.device("cuda", 0))._place)

    assert place() == "cpu"
    dist.get_backend_config = lambda group=None: "cuda:nccl"
    assert place() == "cuda:0"


def test_ranks_never_pickle() -> None:
    """No module uses object collectives: `torch.distributed`'s, and Accelerate's, unpickle what the
    others send.
    """
    unsafe = ("object_list", "gather_object")
    tops = ("fsdp_demo", "deepspeed_ext", "recipes")
    for file in [f for top in tops for f in (ROOT / top).rglob("*.py")]:
        for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(n, "attr", getattr(n, "id", getattr(n, "name", "")))
            assert not isinstance(name, str) or not name.endswith(unsafe), (file, name)
