"""Attempts: one run id serves several starts on one store, one after the other, as a supervisor
makes them that restarts what has died.

Keys of a run in the store:

    <run>/attempt             number of the attempt that islands join now
    <run>/<n>/slot/<island>   who plays this island in attempt n, and how often its place was taken anew: compare_set
    <run>/<n>/begun           which meeting of the islands is under way: who takes a place anew joins them
    <run>/<n>/beat/<island>   another value every second while that process lives, until the islands have met
    <run>/<n>/asked           another value whenever an island that reaches none of the others asks whether they train
    <run>/<n>/trains/<island> the newest of these questions that this island has seen while it trains
    <run>/<n>/came, starters  who begins the attempt (`starting.py`)
    <run>/<n>/ended           island that left attempt n (it was told to stop, or lost a peer), or whose process was found dead
    <run>/<n>/finished        island that came to the end of the run

The first that comes after an attempt has ended opens the next; the others join it. A process takes
part in one attempt of a run for its life; its exchanges have keys of their own below it.
"""  # noqa: E501

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
import zmq

from ..elastic.store_session import newest
from ..errors import NeedsDecision, PeerLost, StoreSilent, see
from ..membership.protocol_types import Member
from ..net.address import Keys, split_address
from ..peers.join_messages import JoinAnswer, Request, ask_join_server, listener_key
from ..status import leave
from ..store.client import Store, WorldStore
from . import environment, starting
from .position import Replica

log = logging.getLogger("fsdp_demo")

PATIENCE = 5.0  # seconds that whoever stops waits for the store

_lock = threading.RLock()
_pulses: dict[tuple[int, str, str, int], Pulse] = {}  # of this process, by its id: a fork has none
# who has waited in vain would take its own place for that of somebody dead
_in_vain: dict[tuple[int, str, str, int], str] = {}


class Finished(NeedsDecision):
    """An island starts after the run has come to its end."""


def join(topology: Replica, store: Store | None = None) -> Pulse:
    """The attempt in which this process takes part; decided by rank 0 of the island at the first
    call, and told to the others.

    An island that a supervisor has started again, and that finds the run finished by the others,
    ends with status 0: it is not needed. store: a connection that may be used for it.

    Raises:
        ValueError: the run has finished, or a process that lives plays the same island.
        PeerLost: no store; too few islands came (`roll.call`); on other ranks: rank 0 did not say
            in time.
    """
    known = os.getpid(), topology.endpoint, topology.run, topology.island
    with _lock:
        if known in _in_vain:
            raise PeerLost(_in_vain[known])
        if known not in _pulses:
            _refuse_second_main()
            try:
                place = _from_first(
                    topology, lambda: _begin(topology, store or topology.open_store())
                )
            except Finished:
                if environment.whole(os.environ, "ISLAND_ATTEMPT", 0) > 0:  # by a supervisor
                    what = "run %r has finished while %s was away: it is not needed any more, the "
                    what += "others hold what came out. It ends with status 0%s"
                    log.warning(what, topology.run, topology.name, see("run-finished"))
                    leave(0)
                raise
            except PeerLost as error:
                if not isinstance(error, StoreSilent):
                    _in_vain[known] = str(error)  # its traceback would keep the model
                raise
            _pulses[known] = Pulse(topology, place, beats=topology.rank == 0, store=store)
        elif topology.world > 1 and topology.rank == 0:
            # who joins later than rank 0 reads it there
            _from_first(topology, lambda: _pulses[known].taken)
        return _pulses[known]


def has_joined() -> bool:
    """Whether this process takes part in an attempt, of any run."""
    return bool(_pulses)


def _refuse_second_main() -> None:
    """Raise ValueError where multiprocessing is importing the script into a process that is to do
    something else. A rank that `mp.spawn` starts has done that when it comes here.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(
            "this process was started by multiprocessing (a DataLoader worker, say), which runs "
            "the script again by the start method spawn or forkserver, and would train as a second "
            "island. Put what the script does into a function that is called under "
            f'if __name__ == "__main__":{see("rank-taken")}'
        )


class Taken(NamedTuple):
    """A place in an attempt: its number, how often the place was taken before in it, whether the
    others train already, and which islands began or begin it."""

    number: int
    life: int = 0
    late: bool = False
    starters: tuple[int, ...] = ()


def _from_first(topology: Replica, decide: Callable[[], Taken]) -> Taken:
    """What `decide` gives, or raises, on rank 0, on all ranks, by their own world's store."""
    if topology.world == 1:
        return decide()
    own = WorldStore(
        dist.distributed_c10d._get_default_store(), "the island's own rendezvous", topology.timeout
    )
    # torchrun's ranks may find the store of those before them
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"fsdp_demo/attempt/{start}/{topology.endpoint}/{topology.run}"
    if topology.rank == 0:
        try:
            taken = decide()
        except (ValueError, PeerLost) as error:
            kind = next(name for name, form in _ERRORS.items() if isinstance(error, form))
            own.set(f"{key}/0", json.dumps([None, kind, str(error)]))
            raise
        own.set(f"{key}/0", json.dumps([taken, "", ""]))
        return taken
    told, kind, text = own.gather(
        key,
        [0],
        tuple[Taken | None, str, str],
        2 * topology.timeout + 60,
        "rank 0 of this island, which says which attempt of the run it joins",
        cure=": it may have died",
        kind="rank",
    )[0]
    if told is None:
        raise _ERRORS[kind](text)
    return told


_ERRORS: dict[str, type[Exception]] = {"finished": Finished, "lost": PeerLost, "wrong": ValueError}
"""What rank 0 tells the other ranks of an error: the first of these that it is."""


def _begin(topology: Replica, store: Store) -> Taken:
    """A place in an attempt, once who begins it is known; else in the next attempt."""
    while True:
        taken = _take(topology, store)
        at = store.under(f"{topology.run}/{taken.number}")
        called = starting.call(at, topology, taken.late, partial(_live, topology, at))
        if called is not None:
            return taken._replace(late=called.late, starters=called.starters)


def _take(topology: Replica, store: Store) -> Taken:
    """Take this island's place in the attempt that has not ended, opening one if needed."""
    t, me = topology, secrets.token_hex(8)
    once = (
        f"ISLAND_RUN={t.run!r} was already started by an island with ISLAND_RANK={t.island} on the "
        f"store {t.endpoint}"
    )
    while True:
        text = _newest(t, store)
        at = store.under(f"{t.run}/{text}")
        if by := at.get("finished"):
            raise Finished(
                f"{once}, and has finished (island {by} said so): set a new ISLAND_RUN on all "
                f"islands{see('run-finished')}"
            )
        if at.get("ended"):
            store.compare_set(f"{t.run}/attempt", text, str(int(text) + 1))
            continue
        slot = f"slot/{t.island}"
        before = at.compare_set(slot, "", f"{me} 0")
        fresh = before == f"{me} 0"
        if not fresh and _live(t, at, [t.island]):
            cure = (
                "set a different ISLAND_RANK on each, or a new ISLAND_RUN on all "
                f"islands{see('rank-taken')}"
            )
            where = starting.where(at, t.island)
            raise ValueError(f"{once}, which still runs{where}: {cure}")
        life, begun = 0 if fresh else _lives(before) + 1, at.get("begun")
        others = [j for j in range(t.islands) if j != t.island]
        waits = not begun if fresh else _waits(t, at)  # else: do the others train?
        if waits or (begun and (_live(t, at, others) or _train(t, at, others))):
            if fresh or at.compare_set(slot, before, f"{me} {life}") == f"{me} {life}":
                starting.beat(at, t.island)
                return Taken(int(text), life, late=not waits)
        gone = "the islands that began it are" if fresh else f"island {t.island}'s last life is"
        log.info("attempt %s of run %r has ended: %s gone", text, t.run, gone)
        at.compare_set("ended", "", str(t.island))


def _newest(topology: Replica, store: Store) -> str:
    """The number of the run's newest attempt, as text; a new run begins with attempt 0."""
    text = store.compare_set(f"{topology.run}/attempt", "", "0")
    if not (text.isascii() and text.isdigit()):
        raise ValueError(
            f"{topology.run}/attempt in the store at {topology.endpoint} is {text!r:.40}, not a "
            "number: set a new ISLAND_RUN"
        )
    return text


def _lives(slot: str) -> int:
    """How often a place was taken anew, from the value of its key."""
    number = slot.partition(" ")[2]
    if not (number.isascii() and number.isdigit()):
        raise ValueError(
            f"{slot!r:.60} in the store names no life of an island: set a new ISLAND_RUN"
        )
    return int(number)


def _waits(topology: Replica, at: Store) -> bool:
    """Whether the attempt has not begun, and begins without this island, whose end ends nothing."""
    if at.get("begun"):
        return False
    starters = starting.decided(at, topology.count)
    return topology.island >= topology.count or (
        starters is not None and topology.island not in starters
    )


def _live(topology: Replica, at: Store, islands: Sequence[int]) -> bool:
    """Whether any of these islands lives: its listener answers, or, before they have come together,
    its beat moves.
    """
    if meeting := at.get("begun"):
        below = at.under(meeting)
        record = newest(below)
        among = [m for m in record.members if m.slot in islands] if record else []
        found = listeners(below, among, topology.token)
        return any(answer is not None for _, answer in found)
    return _changes(at, [f"beat/{i}" for i in islands])


def _train(topology: Replica, at: Store, islands: Sequence[int]) -> bool:
    """Whether any of these islands says through the store that it trains. Asked where no listener
    answers: the links of this island may be cut while those of the others are not.
    """
    ask = partial(at.set, "asked", secrets.token_hex(8))
    if train := _changes(at, [f"trains/{i}" for i in islands], ask):
        log.info("%s reaches no island, but they train, as they say in the store", topology.name)
    return train


def _changes(at: Store, keys: list[str], ask: Callable[[], None] = lambda: None) -> bool:
    """Whether one of these keys gets another value within a few beats, once `ask` was called."""
    before, end = at.get_all(keys), time.monotonic() + starting.BEATS * starting.BEAT
    ask()
    while time.monotonic() < end and not at.get("ended"):
        time.sleep(starting.BEAT / 5)
        if at.get_all(keys) != before:
            return True
    return False


def listeners(
    at: Store, members: Iterable[Member], token: str
) -> Iterator[tuple[Member, JoinAnswer | None]]:
    """Each of these members of a run (`at`: below its keys), and what the listener of its first
    peer group says of it; None: it does not answer. It answers in its network thread, so nothing of
    this disturbs the run.
    """
    keys = Keys(token, at.prefix.rstrip("/")) if token else None
    context = zmq.Context()
    try:
        for member in members:
            answer, listener = None, at.get(listener_key(member, 0))
            if listener:
                place = split_address(listener)
                answer = ask_join_server(context, keys, *place, Request(ask="status"), 3.0)
            yield member, answer
    finally:
        context.destroy(0)


Job = Callable[[Store], Any]


class Pulse:
    """One daemon thread of a process that takes part in an attempt: it beats and does what it is
    given, on `store`'s connection or its own.

    A store that does not answer is said once; it is tried again, ever more rarely.

    Attributes:
        prefix: `run/attempt`, which stands before every key.
        deadline: seconds that a caller should wait for a job. taken: this island's place in the
            attempt.
    """

    def __init__(
        self, topology: Replica, taken: Taken, beats: bool = False, store: Store | None = None
    ):
        self.taken, self.deadline = taken, min(topology.question, PATIENCE)
        self.prefix = prefix = f"{topology.run}/{taken.number}"
        self._open = lambda: topology.open_store(topology.question).under(prefix)
        self._jobs: queue.SimpleQueue[tuple[Job, Future[bool]] | None] = queue.SimpleQueue()
        self._island, self._asked = topology.island, ""
        self._beat: Job = lambda at: starting.beat(at, topology.island)
        self._each: list[Job] = [self._beat] if beats else []
        self._at = None if store is None else store.within(topology.question).under(prefix)
        self._pause, self.silent, self._met = starting.BEAT, False, False
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._thread.start()
        # a daemon thread inside torch when the interpreter ends can abort the process
        atexit.register(self.stop)

    def quiet(self) -> None:
        """Stop the beats: from now on islands hear each other. An island that reaches none of them
        is answered through the store (`_train`).
        """
        self._met = True
        if self._beat in self._each:
            self._each[self._each.index(self._beat)] = self._answer

    def _answer(self, at: Store) -> None:
        """Say to an island that asks in the store that this one trains, once for each question."""
        if (asked := at.get("asked")) != self._asked:
            self._asked = asked
            at.set(f"trains/{self._island}", asked)

    def every(self, job: Job) -> None:
        """Do `job` once a second from now on."""
        self._each.append(job)

    def no_more(self, job: Job) -> None:
        """Undo `every`."""
        if job in self._each:
            self._each.remove(job)

    def ask(self, job: Job, seconds: float) -> bool:
        """Do `job` at once, and wait for it at most so long; whether it was done."""
        done = Future[bool]()
        self._jobs.put((job, done))
        with suppress(TimeoutError):
            return done.result(max(seconds, 0.0))
        return False

    def stop(self) -> None:
        """End the thread, unless a silent store holds it."""
        atexit.unregister(self.stop)
        self._jobs.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                task = self._jobs.get(timeout=max(due - time.monotonic(), 0.0))
            except queue.Empty:
                for job in list(self._each):
                    if not self._do(job) and self.silent:
                        break  # each would wait for it anew
                due = time.monotonic() + self._pause
                continue
            if task is None:
                return
            job, done = task
            done.set_result(self._do(job))

    def _do(self, job: Job) -> bool:
        """Do one job; whether it was done. An error is logged here."""
        try:
            self._at = self._at or self._open()
            job(self._at)
        except PeerLost as error:
            if not self.silent:
                goes_on = "training goes on, but an island that is lost cannot come back"
                then = goes_on if self._met else "this island has not met the others: it waits"
                what = str(error).partition(": start there")[0]
                log.warning("%s; %s%s", what, then, see("store-silent"))
            self._at, self.silent = None, True
            self._pause = min(max(2 * self._pause, 10.0), 60.0)
            return False
        except Exception as error:  # of a callback, or a value that somebody else wrote
            log.warning("presence: %s", error)
            return False
        if self.silent:
            log.info("the store answers again")
        self._pause, self.silent = starting.BEAT, False
        return True
