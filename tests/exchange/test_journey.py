"""The way of one step through the package: no floor that only hands on, and no source that is read
twice.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_demo

from ..support import journey
from ..support.inside import in_ranks

MOST = {"demo": 39, "streaming_diloco": 39, "save": 43, "load": 62}
MOST |= {"death": 23, "newcomer": 92, "donor": 56}
"""Files, as docs/architecture.md says."""
KEPT = {"save": 9, "load": 10}
"""Of them those of a checkpoint: of `checkpoint`, and the state of an exchange as it is saved."""
BEYOND = {"death": 5, "newcomer": 6, "donor": 15}
"""Of them those that an ordinary step, or an ordinary start and a step, does not enter."""
PRESENCE = {
    "rendezvous/attempts.py",
    "elastic/peer_group.py",  # which epoch it is in
    "rendezvous/stop_notices.py",
    "rendezvous/position.py",
    "rendezvous/starting.py",
    "store/client.py",
    "store/connection.py",
}
"""What the threads may enter that tell the store, by the clock, that the island lives. They have no
part in a step.
"""


@pytest.mark.parametrize(
    ("name", "title", "changes"),
    [
        ("demo", "A gradient under `demo`", {}),
        ("streaming_diloco", "A delta", {"period": 10, "delay": 5, "layers": 1}),
    ],
)
@in_ranks(2, 1)
def test_journey_files_of_a_step(me: Any, name: str, title: str, changes: dict[str, int]) -> None:
    """A step of the default path enters at most the files that the table of journeys lists, and
    each room that the page names.
    """
    followed = journey.step(name, **changes)
    clocked = set().union(*map(followed.entered_by, journey.BY_THE_CLOCK))
    files = followed.files
    missed = journey.written(title) - followed.rooms
    assert not missed, missed
    assert followed.threads >= {"MainThread", "exchange", "network"}
    assert clocked <= PRESENCE, clocked
    assert files >= {"exchange/runtime.py", "elastic/peer_group.py", "membership/machine.py"}
    assert not files & {f"exchange/{name}.py" for name in ("exchange", "readings", "resume")}
    assert len(files) <= MOST[name], " ".join(sorted(files))


def test_journey_files_of_save_and_load(run_ranks: Any, tmp_path: Path) -> None:
    """A save and a load enter at most the files that the table of journeys lists. The state is
    saved by two islands with a message under way and loaded by three.
    """

    def kept(files: set[str]) -> set[str]:
        state = {"exchange/resume.py", "exchange/saved_state.py"}
        return {file for file in files if file.startswith("checkpoint/") or file in state}

    def run(me: Any, follow: Any) -> tuple[set[str], set[str]]:
        followed = follow(str(tmp_path))
        return followed.files, followed.rooms

    entered: set[str] = set()
    for files, rooms in run_ranks(lambda me: run(me, journey.save), 2, 1):
        entered |= rooms
        assert files >= {"checkpoint/manager.py", "checkpoint/folders.py"}
        assert len(files) <= MOST["save"], " ".join(sorted(files))
        assert len(kept(files)) <= KEPT["save"], kept(files)
    for files, rooms in run_ranks(lambda me: run(me, journey.load), 3, 1):
        entered |= rooms
        assert files >= {"checkpoint/choice.py", "exchange/resume.py"}
        assert len(files) <= MOST["load"], " ".join(sorted(files))
        assert len(kept(files)) <= KEPT["load"], kept(files)
    assert not journey.written("A save and a load") - entered


def test_journey_files_of_a_lost_island(run_ranks: Any, tmp_path: Path) -> None:
    """An island dies in mid-exchange: until the others have delivered that message and the next
    one, they enter at most the files that the table of journeys lists.
    """

    def run(me: Any) -> Any:
        followed = journey.death(str(tmp_path))
        return followed and (followed.threads, followed.files, followed.beyond, followed.rooms)

    one, lost, two = run_ranks(run, 3, 1, timeout=120)
    assert lost is None
    assert not journey.written("An island dies") - one[3] - two[3]
    for threads, files, beyond, _ in (one, two):
        assert threads >= {"exchange", "network", "membership store"}
        assert {"elastic/store_session.py", "store/client.py"} <= beyond
        assert len(files) <= MOST["death"], " ".join(sorted(files))
        assert len(beyond) <= BEYOND["death"], " ".join(sorted(beyond))


def test_journey_files_of_a_newcomer(run_ranks: Any, tmp_path: Path) -> None:
    """A newcomer in its `attach`, and its donor until it takes part, enter at most the files that
    the table of journeys lists.
    """

    def run(me: Any) -> tuple[set[str], set[str], set[str]]:
        followed = journey.newcomer(str(tmp_path))
        return followed.files, followed.beyond, followed.rooms

    donor, _, newcomer = run_ranks(run, 3, 1, timeout=120)
    assert not journey.written("A newcomer joins") - donor[2] - newcomer[2]
    for name, (files, beyond, _) in {"donor": donor, "newcomer": newcomer}.items():
        assert {"exchange/snapshot.py", "peers/bulk_stream.py"} <= beyond
        assert len(files) <= MOST[name], " ".join(sorted(files))
        assert len(beyond) <= BEYOND[name], " ".join(sorted(beyond))


def test_journey_hooks_call_runtime() -> None:
    """The hooks of the optimizer call the runtime directly."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, "demo", inner_optimizers="as_is")
    hooks, runtime = exchange._hooks, exchange._runtime
    assert (hooks._run_before, hooks._run_after) == (runtime.before, runtime.after)
    exchange.detach()


def test_journey_gradients_read_once_per_channel() -> None:
    """Each channel reads the gradients once, and one more read checks that they are finite."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, "demo", inner_optimizers="as_is")
    read, reads = exchange.host.tensors, Counter()

    def counted(source: str) -> Any:
        reads[source] += 1
        return read(source)

    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()  # the first one looks for what was changed since attach
    exchange.host.tensors = counted
    optimizer.step()
    assert reads == {"gradient": 1 + len(exchange.channels)}  # once whether they are finite
    exchange.detach()
