"""Islands that are killed: one at each piece that it sends, and the others go on with the same
bits. Threads as islands, real connections over loopback, a store in memory
(tests/support/elastic.py). Vectors hold whole numbers, so that the mean of exactly these islands
is known bit by bit.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest

from fsdp_demo import PeerLost
from fsdp_demo.elastic import chunks, message_state, peer_group
from fsdp_demo.elastic.peer_group import PeerGroup

from ..support.cases import named
from ..support.elastic import Islands, agree, descriptors, exchanged, talk
from ..support.inside import in_a_process
from ..support.threaded import alone

ALL = (0, 1, 2)
# messages of the start about the round trip: where the kernel does not tell, it is measured
FIRST = 1 if sys.platform == "linux" else 6


def killed_at(
    frames: range, victim: int, count: int = 6, islands: int = 3, scale: int = 1
) -> list[list[tuple[int, ...]]]:
    """For each of the pieces that a victim hands over, one run in which it is killed there; whose
    contributions each message had.
    """
    found = []
    left = tuple(s for s in range(islands) if s != victim)
    for k in frames:
        with named(f"island {victim} dies at piece {k}"):
            run = Islands(islands)
            run.kill_at_frame(k, (victim, 0))
            run.run(talk(count, scale))
            slots = agree(run.survivors(victim))
            assert slots[-1] == left and all(of in (tuple(range(islands)), left) for of in slots), (
                slots
            )
            assert run.expelled == []
            assert isinstance(run.results[victim, 0], PeerLost)
            found.append(slots)
    return found


@in_a_process
def test_lost_island_one_of_all_that_must_stay() -> None:
    """Where all must stay, the loss of an island ends every rank of the others at once, with the
    reason, also where one rank alone has lost it. No record is written.
    """
    here = Islands(2, 2, dead=30.0, least=2)

    def fn(line: PeerGroup) -> None:
        exchanged(line, 0)
        driver = line._driver
        assert driver is not None
        rank = driver.machine.rank
        if line.slot == 1:
            if rank == 0:
                here.kill(1, 0)
            over.wait(20.0)
            return
        with pytest.raises(PeerLost, match="2 must go on together, and 1 of them can") as lost:
            exchanged(line, 1)
        why[rank] = str(lost.value)
        if len(why) == 2:
            over.set()

    why, over = dict[int, str](), threading.Event()
    here.run(fn)
    assert "island 1 (island1) is lost" in why[0] and "#island-lost" in why[0]
    assert "another rank of this island does not hear it" in why[1]
    assert not here.store.under("line").get("record/1") and here.expelled == []


@in_a_process
def test_lost_island_none_all_messages_are_of_all() -> None:
    """Without a fault all messages are of all islands."""
    for islands, ranks, token in ((3, 1, ""), (2, 2, "a secret of these tests")):
        all_of = Islands(islands, ranks, token=token)
        all_of.run(talk(8))
        assert agree(all_of.survivors()) == [tuple(range(islands))] * 8


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("frames", [range(0, 16, 3), range(16)], ids=["some", "each"])
def test_lost_island_killed_at_each_piece(run_ranks, victim: int, frames: range) -> None:
    """An island is killed at a piece that it sends, and the others go on with the same bits. Its
    pieces: 2 of a gather; of an exchange 2 bodies, 2 shares, 2 parts; 2 of a text of any length;
    6 of a mean.
    """
    found = alone(run_ranks, lambda: killed_at(frames, victim))
    # who dies before its first piece is in nothing; who dies after all pieces of a message can be
    # in it, and is in no later one
    assert found[0] == [tuple(s for s in ALL if s != victim)] * 6
    assert any(slots[0] == ALL for slots in found)


@pytest.mark.parametrize("frames", [range(5, 36, 15), range(2, 36, 3)], ids=["some", "each"])
@in_a_process
def test_lost_island_killed_within_a_long_message(frames: range) -> None:
    """An island is killed within a long message that several connections carry."""
    chunks.LARGEST, chunks.SMALL = 4096, 256
    peer_group.streams = lambda rtt, num_peers: 3
    killed_at(frames, 2, 4)


@pytest.mark.parametrize("rank", [0, 1])
@in_a_process
def test_lost_island_one_rank_then_its_sibling(rank: int) -> None:
    """One rank of an island is killed, and its sibling a moment later. A peer group decides nothing
    for itself: both have the same contributors for each message.
    """
    for k in (1, 5):
        with named(f"piece {k}"):
            two = Islands(3, 2, dead=4.0)
            two.kill_at_frame(k, (1, rank))

            def fn(line: Any, two: Islands = two) -> Any:
                try:
                    return talk(5)(line)
                except PeerLost:
                    time.sleep(0.3)
                    two.kill(1, 1 - rank)
                    raise

            two.run(fn)
            found = two.survivors(1)
            slots = agree(found[0::2])
            assert slots == agree(found[1::2]) and slots[-1] == (0, 2)
            assert two.expelled in ([], [(1, 1 - rank)])


@pytest.mark.parametrize("moment", ["Freeze", "PostReport", "ProposeRecord", "Adopted"])
@pytest.mark.parametrize("after", [False, True])
@in_a_process
def test_lost_island_second_killed_in_the_change(moment: str, after: bool) -> None:
    """A second island is killed at a moment of the change of members."""
    for second in (0, 2):
        with named(f"island {second}"):
            four = Islands(4)
            four.kill_at_frame(3, (3, 0))
            four.kill_in(moment, (second, 0), after=after)
            four.run(talk(6))
            # another may have proposed before it
            lost = {3, second} if isinstance(four.results[second, 0], PeerLost) else {3}
            assert lost == {3, second} or moment == "ProposeRecord"
            assert agree(four.survivors(*lost))[-1] == tuple(s for s in range(4) if s not in lost)


@pytest.mark.parametrize("islands", [3, 4])
@in_a_process
def test_lost_island_two_at_once(islands: int) -> None:
    """Two islands are killed at once."""
    for k in (1, 5):
        with named(f"piece {k}"):
            four = Islands(islands)
            four.kill_at_frame(k, (0, 0), (2, 0))
            four.run(talk(6))
            slots = agree(four.survivors(0, 2))
            assert slots[-1] == tuple(s for s in range(islands) if s not in (0, 2))


@in_a_process
def test_network_thread_failure_is_raised_at_a_launch() -> None:
    """A launch after the network thread has failed raises an error that names the failure."""
    one = Islands(1)

    def fn(line: Any) -> None:
        exchanged(line, 0)
        line._driver.do(lambda: 1 / 0)
        while line._driver._poller.thread.is_alive():
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(PeerLost, match="the network thread has failed: ZeroDivisionError"):
                exchanged(line, 1)
        assert not line.wait_stable(5.0)

    one.run(fn)
    one.survivors()
    assert one.expelled == [(0, 0)]  # in a run this ends the process with 75


@in_a_process
def test_end_waits_for_nobody_that_is_gone() -> None:
    """A rank that ends waits for nobody that is gone: the other rank of its island has ended, and
    so has the peer, whose last word was lost. No change of members would ever come to its end.
    """
    two, waited, met = Islands(2, ranks=2), list[bool](), threading.Barrier(4)

    def fn(line: Any) -> None:
        exchanged(line, 0)
        _, rank = next(key for key, known in two.lines.items() if known is line)
        met.wait(20)
        if line.slot == 1:
            two.kill(1, rank)
        elif rank == 0:
            line.end()
            line.release()
            raise PeerLost("this one has ended")
        else:
            waited.append(line.wait_read(15))
            assert line._driver.machine.state == "frozen"
            raise PeerLost("and this one, too")

    two.run(fn)
    assert waited == [True]


@in_a_process
def test_lost_island_leaks_no_descriptor_or_thread() -> None:
    """Descriptors and threads fall back after a loss."""
    here, counts = Islands(3), list[tuple[int, int]]()

    def fn(line: Any) -> None:
        for n in range(24):
            if n == 12 and line.slot == 2:
                here.kill(2)
            exchanged(line, n)
        line.wait_stable(10)

    for k in range(3):
        here = Islands(3)
        here.run(fn)
        assert agree_on_two(here)
        until = time.monotonic() + 20  # a thread that asked the store may be about to end
        while k and descriptors() > counts[0] and time.monotonic() < until:
            time.sleep(0.05)
        counts.append(descriptors())
    assert counts[2] <= counts[0], counts


def agree_on_two(here: Islands) -> bool:
    return all(
        here.lines[s, 0].slots == (0, 1) and here.lines[s, 0].alive == (0, 1) for s in (0, 1)
    )


@in_a_process
def test_lost_island_while_a_mean_is_calculated() -> None:
    """The change comes while a part of the mean is calculated: it is made once, and the others get
    it in the new view.
    """
    plain = message_state.RoundMessage.average
    here = Islands(3)

    def slow(message: message_state.RoundMessage, *args: Any) -> Any:
        if message.n - FIRST == 1 and message.me.slot == 0:
            # the message is whole but for this part
            while not any(of.slot == 2 for of, _ in message.parts):
                time.sleep(0.01)
            here.kill(2)
            while here.lines[0, 0]._driver.changes == 0:
                time.sleep(0.01)
            time.sleep(0.3)
        return plain(message, *args)

    message_state.RoundMessage.average = slow  # type: ignore[method-assign]
    here.run(talk(4))
    assert agree(here.survivors(2)) == [ALL, ALL, (0, 1), (0, 1)]
