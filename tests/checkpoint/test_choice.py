"""From which state each island goes on: what all hold, what may be joined, and who must ask a
person.
"""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp_demo
from fsdp_demo.checkpoint.choice import HeldCheckpoint, alike, choose, look, superfluous, together
from fsdp_demo.checkpoint.files import write_part
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.errors import NeedsDecision
from fsdp_demo.peers.votes import Ranks
from fsdp_demo.store.client import WorldStore


def at(*steps, applied="", owner=-1):
    return [HeldCheckpoint(s, applied, owner) for s in steps]


TEN = at(10, applied="9")


def names(held):
    return [f"island{i}" for i in range(len(held))]


def chosen(held, how="common"):
    found = choose(names(held), held, how)
    return None if found is None else [h and h.step for h in found]


CHOSEN = [
    # the newest checkpoint that all islands hold
    ("common", [[], []], None),
    ("auto", [[], []], None),
    ("common", [at(10, 20, 30), at(10, 20)], [20, 20]),
    ("common", [at(10)], [10]),
    # states between the same exchanges are joined, each at its own step: SIGTERM between two
    # exchanges, at 17 and 19, and the checkpoints of equal steps before them
    ("common", [[*TEN, *at(17, applied="9")], [*TEN, *at(19, applied="9")]], [17, 19]),
    ("auto", [[*TEN, *at(17, applied="9")], [*TEN, *at(19, applied="9")]], [17, 19]),
    # has applied what the other has lost
    ("common", [[*TEN, *at(17, applied="9")], [*TEN, *at(21, applied="20")]], [17, 10]),
    # of one step after unlike exchanges: those between the same ones, of 9
    ("common", [[*TEN, *at(20, applied="19")], [*TEN, *at(20, applied="9")]], [10, 20]),
    # states that do not say what they have applied are common at equal steps
    ("common", [at(10, 20), at(10, 20, applied="19")], [20, 20]),
    # `auto` takes over only where an island holds no checkpoint
    ("auto", [at(10), []], [10, None]),
    ("auto", [[], at(10)], [None, 10]),
    ("auto", [at(1), []], [1, None]),
    ("auto", [at(10, 20), at(10), []], [10, 10, None]),
    ("take_over", [at(10), at(12)], [None, 12]),
    ("take_over", [at(10), at(10, 12)], [10, 10]),
    # swapped folders are taken over; a copy of one island's folder is not swapped
    ("take_over", [at(10, owner=1), at(10, owner=0)], [10, 10]),
    ("common", [at(10, owner=0), at(10, owner=0)], [10, 10]),
]  # fmt: skip


@pytest.mark.parametrize("how, held, steps", CHOSEN)
def test_choose_steps(how, held, steps):
    """From which step of its own each island goes on."""
    assert chosen(held, how) == steps


REFUSED = [
    ("common", [at(20, applied="19"), at(20, applied="9")],
        "at equal steps they have applied unlike exchanges"),
    ("common", [at(10), at(12)], "no checkpoint is held by all islands"),
    ("common", [at(10), []], "--resume auto"),
    ("common", [[], at(10)], "--resume auto"),
    ("common", [at(1), []], "--resume auto"),
    ("auto", [at(10), at(12)], "step 12 of island1.*--take-over.*start anew"),
    ("auto", [at(10), at(12)],
        r"no checkpoint is held by all islands \(island0: 10; island1: 12\)"),
    ("common", [at(10, owner=1), at(10, owner=0)],
        r"swapped: island0 \(ISLAND_RANK=0\) finds what island 1 saved"),
    ("auto", [at(10, owner=1), []], "swapped"),
]  # fmt: skip


@pytest.mark.parametrize("how, held, said", REFUSED)
def test_choose_asks_a_person(how, held, said):
    """What a person must decide is refused, with what is held and what may be done."""
    with pytest.raises(NeedsDecision, match=said):
        chosen(held, how)


def elastic(island, *steps, took_part=(0, 1, 2), applied=""):
    return [HeldCheckpoint(s, applied, island, "", json.dumps(list(took_part))) for s in steps]


def test_choose_island_that_was_away():
    """An island that was away does not hold the others back. Islands 0 and 1 saved 200 and 300
    without island 2, whose last step is 100.
    """
    first, last = (elastic(0, 100), elastic(1, 100)), ((0, 1), (0, 1))
    two = [
        [*old, *elastic(i, 200, 300, took_part=those)]
        for i, (old, those) in enumerate(zip(first, last, strict=True))
    ]
    held = [*two, elastic(2, 100)]
    assert chosen(held, "newest") == [300, 300, None]
    assert chosen(held, "auto") == [100, 100, 100] and chosen(held) == [100, 100, 100]
    # with one of the two gone for good the other one counts
    assert chosen([two[0], [], elastic(2, 100)], "newest") == [300, None, None]
    # one that left just before the others stopped has a state that fits: it keeps it
    late = elastic(2, 305, applied="299")
    alone = [
        [*each, *elastic(i, 307, applied="299", took_part=(0, 1))] for i, each in enumerate(two)
    ]
    assert chosen([*alone, late], "newest") == [307, 307, 305]


def test_choose_newcomer_that_saved_last():
    """A newcomer that saved last does not take the others back. Island 0 was away from step 100 on,
    came back, and saved 440 before it took part.
    """
    old = [elastic(0, 100), *(elastic(i, 100, 400, 420, took_part=(1, 2)) for i in (1, 2))]
    held = [[*old[0], *elastic(0, 440, took_part=(1, 2))], *old[1:]]
    assert chosen(held, "newest") == [None, 420, 420] == chosen(old, "newest")
    # who took part holds nothing any more: the newcomer's is the newest that there is
    assert chosen([held[0], [], []], "newest") == [440, None, None]
    assert chosen([held[0], [], held[2]], "newest") == [None, None, 420]


def test_choose_whoever_saved_last():
    """Islands that took part in a step go on together, whoever saved last. Island 0 was killed
    before it could save step 30, of which it was part.
    """
    held = [elastic(0, 10, 20), elastic(1, 10, 20, 30), elastic(2, 10, 20, 30)]
    assert chosen(held, "newest") == [20, 20, 20]
    # a state that does not say who took part: all are asked
    assert chosen([at(10), at(10, 20)], "newest") == [10, 10]
    assert chosen([at(10), at(12)], "newest") == [None, 12]


STATES = st.builds(HeldCheckpoint, st.integers(0, 6), st.sampled_from(["", "1", "2"]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(STATES, max_size=5), min_size=1))
def test_choose_result_is_held_and_fits(held):
    """The choice from any lists gives each island a state of its own; all are of one step, or have
    applied the same.
    """
    for states in [together(held), *alike(held)]:
        if states is None:
            continue
        assert all(state in each for state, each in zip(states, held, strict=True))
        assert (
            len({h.step for h in states}) == 1
            or len({h.applied for h in states}) == 1
            and states[0].applied
        )
        assert len({h.applied for h in states if h.applied}) <= 1
    if (common := together(held)) is not None and (same := alike(held)):
        assert min(h.step for h in common) >= max(s[0].step for s in same)


def test_head_applied_and_owner(tmp_path):
    """The heads of a checkpoint say what was applied and who saved it."""

    def part(rank, **head):
        write_part(tmp_path, f"rank{rank}", {"islands": 2, "island": 1, **head}, {})

    assert look(tmp_path, 10, 2) == HeldCheckpoint(10)
    part(0, applied={"b": 4, "a": -1})
    part(1, applied={"a": -1, "b": 4})
    assert look(tmp_path, 10, 2) == HeldCheckpoint(10, json.dumps({"a": -1, "b": 4}), 1)
    # another number of islands: equal steps only, and nobody owns it
    assert look(tmp_path, 10, 3) == HeldCheckpoint(10)
    part(1, applied={"a": -1, "b": 9})
    with pytest.raises(ValueError, match="unlike exchanges"):
        look(tmp_path, 10, 2)
    part(0)
    part(1)
    assert look(tmp_path, 10, 2) == HeldCheckpoint(10, owner=1)  # they do not say it
    part(0, participants=[0, 1])
    part(1, participants=[])  # a copy that is not active
    assert [look(tmp_path, 10, n).participants for n in (2, 3)] == ["[0, 1]"] * 2


# -- one rule for plain loops, the Trainer and DeepSpeed -----------------------------------------


ALONE = Ranks(None, 0, 1)


class Told(CheckpointRegistry):
    """A board on which the other islands have left their notes already."""

    def __init__(self, *others):
        topology = fsdp_demo.Topology("mesh", islands=1 + len(others), name="island0")
        super().__init__(topology, ALONE)
        self.others = list(others)

    def _meet(self, note):
        return [note, *self.others]

    def exchange(self, held):
        return [held, *self.others]


def note(*steps, **more):
    return {"name": "island1", "held": [HeldCheckpoint(s).note() for s in steps], **more}


def test_registry_chooses_for_all_islands():
    """The registry chooses for all islands and refuses notes that do not agree."""
    assert Told(note(10, 20)).choose(at(10, 20, 30), "common", {}) == [HeldCheckpoint(20)] * 2
    assert Told(note(resume="auto")).choose(at(10), "auto", {}, resume="auto") == [
        HeldCheckpoint(10),
        None,
    ]
    with pytest.raises(
        NeedsDecision,
        match=r"islands differ in resume \(island0: True, island1: False\): give the same on all",
    ):
        Told(note(10, resume=False)).choose(at(10), "common", {}, resume=True)
    for wrong in ({"name": "island1"}, note() | {"held": [[1, 2, 3, 4, 5, 6, 7]]}):
        with pytest.raises(ValueError, match="note of another form"):
            Told(wrong).choose(at(10), "common", {})


def test_registry_common_checkpoint():
    """The registry knows the newest checkpoint that all islands hold by now."""
    assert (
        Told([[10, "9"], [20, "19"]]).common([*at(10, applied="9"), *at(20, applied="9"), *at(30)])
        == 10
    )
    assert Told(None).common(at(10)) is None
    assert Told([]).common(at(10)) is None
    assert Told([[10, ""]]).common(at(10, 20)) == 10


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), unique=True),
    st.integers(-1, 31),
    st.integers(1, 6),
    st.none() | st.integers(0, 30),
)
def test_rotation_deletes_nothing_needed(steps, common, keep, best):
    """Rotation deletes no checkpoint that is newest, common or best."""
    steps = sorted(steps)
    gone = superfluous(steps, common, keep, best)
    assert gone == [s for s in steps if s not in steps[-keep:] and s < common and s != best]
    assert superfluous(steps, common, None, best) == superfluous(steps, common, 0, best) == []


class Begun(fsdp_demo.Topology):
    """Of a run that has begun without island 1 of 4."""

    starters = (0, 2, 3)


def test_registry_islands_not_begun():
    """Islands that have not begun are not asked: what they hold is not waited for, folders are
    those of slots, and rotation goes on without them until they say something.
    """
    store = WorldStore(dist.HashStore(), "the test", 5.0)
    boards = {
        i: CheckpointRegistry(Begun("islands", i, 4, f"island{i}", timeout=5.0), ALONE)
        for i in (0, 1, 2, 3)
    }
    for registry in boards.values():
        registry._store, registry._number = store, 1
    for i in (2, 3):
        store.set(
            f"checkpoints1/meeting1/note/{i}",
            json.dumps({"name": f"island{i}", "held": [HeldCheckpoint(10, owner=i).note()]}),
        )
    assert boards[0].choose([HeldCheckpoint(10, owner=0)], "common", {}) == [
        HeldCheckpoint(10, owner=i) for i in (0, 2, 3)
    ]
    boards[2].exchange([[10, ""]])
    assert boards[0].common(at(10)) is None  # island 3 has not said anything yet
    boards[3].exchange([[10, ""]])
    assert boards[0].common(at(10)) == 10
    boards[1].exchange([])
    assert boards[0].common(at(10)) is None
