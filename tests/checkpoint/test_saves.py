"""Checkpoints through faults: refused resumes, full disks, torn leavings, processes that wake too
late, a silent store.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp_demo
from fsdp_demo import NotFinite, PeerLost
from fsdp_demo.checkpoint import CheckpointManager, folders
from fsdp_demo.checkpoint.files import first_not_finite, read_head, refuse_not_finite, write_part
from fsdp_demo.checkpoint.folders import (
    ASIDE,
    GIVEN_UP,
    LOCK,
    MANIFEST,
    Fence,
    adopt,
    files_in,
    forget_asides,
    put_aside,
)
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.checkpoint.sharded_state import save_tensors
from fsdp_demo.errors import NeedsDecision, Superseded
from fsdp_demo.peers.votes import Ranks

from ..support.inside import in_ranks


def text(folder):
    (folder / "a.txt").write_text("x")


def single(root, **more):
    return CheckpointManager(root, fsdp_demo.Topology(), **more)


def names(root):
    return sorted(p.parent.name for p in root.glob(f"*/{MANIFEST}"))


def leave(kept, step, **applied):
    """What an island saves on its way out, with an exchange's part, as RunState does. All its ranks
    come together.
    """
    topology = kept.topology
    head = {"islands": topology.islands, "step": step, "island": topology.island}
    head |= {"applied": applied} if applied else {}

    def write(folder):
        write_part(folder / "exchange", f"rank{topology.rank}", head, {"t": torch.ones(3)})

    kept.save(step, write, last=True)
    return kept.path(step)


# -- what is newer is put aside, not deleted -----------------------------------------------------


def second_life(me):
    """Five checkpoints, and a second life in which island 1 sees only the first: the folder of the
    first life, and the manager of the second.
    """
    topology, home = fsdp_demo.Topology.from_env(), me.folder / f"home{me.island}"
    stale, every = me.folder / "stale", [f"checkpoint-{s}" for s in range(10, 60, 10)]
    first = CheckpointManager(home, topology, keep=9)
    first.resume_point(False)
    for step in range(10, 60, 10):
        first.save(step, text)
    first.close()
    if me.island == 1:
        shutil.copytree(home / "checkpoint-10", stale / "checkpoint-10")
    second = CheckpointManager(stale if me.island else home, topology)
    assert second.resume_point().step == 10
    aside = sorted(p.parent.name for p in home.glob(f"*/{ASIDE}"))
    assert (names(home), aside) == ((every, []) if me.island else (every[:1], every[1:]))
    return home, second


@in_ranks(2, 1)
def test_save_refused_resume_leaves_all(me):
    """A refused resume leaves all checkpoints usable."""
    home, second = second_life(me)
    second.close()  # attach would refuse a wrong preset here
    third = CheckpointManager(home, second.topology)
    assert third.resume_point().step == 50
    third.verify(third.path(50))
    assert names(home) == [f"checkpoint-{s}" for s in range(10, 60, 10)]
    assert not any(home.glob(f"*/{ASIDE}"))


@in_ranks(2, 1)
def test_save_aside_removed_after_common(me):
    """Checkpoints that were put aside are removed when the new life has a common checkpoint."""
    home, second = second_life(me)
    for step in (20, 30):
        second.save(step, text)
        me.meet(step)
    second.save(40, text)
    second.close()
    assert names(second.root)[-2:] == ["checkpoint-30", "checkpoint-40"]
    assert not any(home.glob(f"*/{ASIDE}"))


def test_save_given_up_stays_aside(tmp_path):
    """A checkpoint that was given up stays aside. Only manifests move, never data."""
    kept = single(tmp_path, keep=5)
    for step in (10, 20, 30):
        kept.save(step, text)
    put_aside(tmp_path, 20)
    put_aside(tmp_path, 10, given_up=True)
    assert list(kept.whole()) == [10] and (kept.path(20) / GIVEN_UP).exists()
    adopt(tmp_path)
    assert list(kept.whole()) == [10, 30]
    put_aside(tmp_path, 10)
    assert list(kept.whole()) == [10]
    forget_asides(tmp_path)
    assert sorted(p.name for p in tmp_path.glob("check*")) == ["checkpoint-10"]


def test_save_cut_off_removed_others_kept(tmp_path):
    """The remains of a save that was cut off are removed, and folders of others stay."""
    kept = single(tmp_path)
    kept.save(10, text)
    with pytest.raises(KeyboardInterrupt):
        kept.save(20, cut_off)
    (tmp_path / "checkpoint-30").mkdir()  # of another tool
    assert single(tmp_path).resume_point().step == 10
    assert sorted(p.name for p in tmp_path.glob("check*")) == ["checkpoint-10", "checkpoint-30"]


def cut_off(folder):
    text(folder)
    raise KeyboardInterrupt


def test_save_aside_listed_and_taken_back(tmp_path, caplog):
    """The log lists what is put aside, and a resume takes it back alone."""
    kept = single(tmp_path, keep=5)
    for step in (1, 2, 3):
        kept.save(step, text)
    leave(kept, 4)
    put_aside(tmp_path, 1)
    assert "checkpoint-2, checkpoint-3, checkpoint-4" in caplog.text
    assert names(tmp_path) == ["checkpoint-1"]
    again = single(tmp_path)
    assert again.resume_point().folder == again.path(4)


# -- joined between two exchanges ----------------------------------------------------------------


@in_ranks()
def test_save_unlike_steps_between_exchanges(me):
    """Islands that saved at unlike steps between two exchanges go on from their own."""
    topology, home = fsdp_demo.Topology.from_env(), me.folder / f"home{me.island}"
    first = CheckpointManager(home, topology)

    def write(folder):
        head = {"islands": 2, "island": me.island, "applied": {"delta": 9}}
        write_part(folder / "exchange", f"rank{me.proc}", head, {})

    first.save(10, write)
    leave(first, 17 + 2 * me.island, delta=9)
    # one has applied what the other lost
    leave(first, 25, delta=9 + me.island)
    me.meet(1)
    second = CheckpointManager(home, topology)
    point = second.resume_point()
    assert point.folder == second.path(point.step) and point.step == [25, 19][me.island]
    left = [
        "checkpoint-10",
        *(["checkpoint-19"] if me.island else ["checkpoint-17", "checkpoint-25"]),
    ]
    assert names(home) == left


# -- nodes with a disk each ----------------------------------------------------------------------


@in_ranks(1, 2)
def test_save_once_per_disk(me):
    """Where nodes of an island have a disk each, as torchrun numbers their ranks, each of them
    removes old checkpoints and halves, and what one of them lacks is not resumed from.
    """
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": str(me.proc)}
    home, topology = me.folder / f"disk{me.proc}", fsdp_demo.Topology.from_env()
    kept = CheckpointManager(home, topology, keep=2)
    kept.resume_point(resume=False)
    for step in range(1, 5):
        kept.save(step, lambda folder: (folder / f"{me.proc}.txt").write_text("x") and None)
    last = ["checkpoint-3", "checkpoint-4"]
    assert names(home) == last and (home / LOCK).exists()
    assert files_in(home / "checkpoint-4") == [f"{me.proc}.txt"]
    (home / "checkpoint-9").mkdir()
    (home / "checkpoint-9" / folders.UNFINISHED).touch()
    if me.proc:
        (home / "checkpoint-4" / MANIFEST).unlink()
    again = CheckpointManager(home, topology)
    point = again.resume_point("auto")
    again.verify(point.folder)
    assert point.step == 3 and names(home) == ["checkpoint-3"]
    assert sorted(p.name for p in home.glob("check*")) == last


# -- what cannot be written ----------------------------------------------------------------------


def full(folder):
    raise OSError(errno.ENOSPC, "No space left on device", str(folder))


@pytest.mark.parametrize("wait", [True, False])
@in_ranks(1, 2)
def test_save_third_failure_is_error(me, wait):
    """A failed save is a warning, and the third in a row is an error."""
    kept = CheckpointManager(me.folder / "home", fsdp_demo.Topology(rank=me.proc, world=me.procs))
    caught = []

    def fails(folder):
        text(folder) if me.proc == 0 else None
        return (lambda: full(folder)) if me.proc == 1 else None

    for step, write in enumerate([text, fails, fails, text, fails, fails, fails]):
        try:
            kept.save(step, write, wait)
            kept.wait()
        except OSError as error:
            caught.append((step, str(error)))
    kept.close()
    torch.distributed.barrier()  # rank 0 removes the half
    assert kept.failed_saves == 5 and list(kept.whole()) == [0, 3]
    assert not list(kept.root.glob(".checkpoint*"))
    ((step, said),) = caught
    assert step == 6 and ("No space left" if me.proc else "another rank could not write") in said


@in_ranks(1)
def test_save_lost_peer_seals_nothing(me):
    """A lost peer ends a save on all ranks, and nothing is sealed."""
    kept = CheckpointManager(me.folder / "home", fsdp_demo.Topology(rank=me.proc, world=me.procs))

    def state():
        if me.proc == 1:
            raise PeerLost("what was under way is lost")

    def write(folder):
        kept.ranks.together(state, "state")
        torch.distributed.barrier()  # collectives of the writer: nobody may stand here alone
        text(folder)

    with pytest.raises(PeerLost, match="lost"):
        kept.save(5, write)
    assert (list(kept.whole()), kept.failed_saves) == ([], 0)


def test_save_last_raises_and_removes_nothing(tmp_path, caplog):
    """The last save raises at once, removes nothing and does not write its own step again."""
    kept = single(tmp_path, keep=1)
    for step in (1, 2):
        kept.save(step, text, last=True)
    kept.save(2, full, last=True)  # is there already
    with pytest.raises(OSError, match="No space left"):
        kept.save(3, full, last=True)
    assert list(kept.whole()) == [1, 2] and kept.failed_saves == 0 and "training" not in caplog.text
    for step in (4, 5):
        kept.save(step, full, wait=False)
    kept.save(6, lambda folder: lambda: full(folder), wait=False)
    kept.save(7, text, last=True)  # a save under way that fails does not hinder it
    assert list(kept.whole()) == [1, 2, 7] and "the save before failed" in caplog.text


def test_save_not_finite_found_by_name():
    """Values that are not finite are found by name."""
    fine = dict(
        a=torch.full((3,), 3e38), b=torch.empty(0), c=torch.arange(3), d=torch.ones(2).bfloat16()
    )
    assert first_not_finite(fine.items()) == ""
    for bad in (float("nan"), float("inf"), -float("inf")):
        for like in (
            torch.zeros(5),
            torch.zeros(5, dtype=torch.float64),
            torch.zeros(5).bfloat16(),
            torch.zeros(5).to(torch.float8_e5m2),
        ):
            like[3] = bad
            assert first_not_finite([*fine.items(), ("x", like), ("y", like)]) == "x"
    with pytest.raises(NotFinite, match="replica.optimizer.1.m holds values"):
        refuse_not_finite(
            ("replica", {"optimizer": [{}, {"m": torch.tensor([1.0, float("nan")])}]})
        )


# -- torn, nested --------------------------------------------------------------------------------


@pytest.mark.parametrize("tear", ["json", "tensors", "all"])
def test_save_torn_exchange_not_complete(tmp_path, tear):
    """A checkpoint with a torn exchange does not count as complete."""
    kept = single(tmp_path)
    kept.save(3, text)
    place = leave(kept, 5)
    assert list(kept.whole()) == [3, 5]
    if tear == "all":
        shutil.rmtree(place / "exchange")
    elif tear == "json":
        (place / "exchange" / "rank0.json").write_text("{")
    else:
        (place / "exchange" / "rank0.safetensors").unlink()
    assert list(kept.whole()) == [3] and single(tmp_path).resume_point().step == 3


def test_save_nested_json_is_damage(tmp_path):
    """JSON that is nested too deeply counts as damage."""
    deep = "[" * 200_000
    (tmp_path / "rank0.json").write_text(deep)
    with pytest.raises(ValueError, match="is damaged"):
        read_head(tmp_path / "rank0.json")
    (tmp_path / "rank0.json").write_text(json.dumps({"part": deep, "crc32": 0}))
    with pytest.raises(ValueError, match="is damaged"):
        read_head(tmp_path / "rank0.json")
    kept = single(tmp_path)
    kept.save(1, text)
    (kept.path(1) / "manifest.json").write_text(deep)
    assert list(kept.whole()) == []
    with pytest.raises(NeedsDecision, match="no manifest that can be read"):
        single(tmp_path).resume_point()


# -- one life at a time --------------------------------------------------------------------------


def test_save_earlier_life_writes_nothing(tmp_path):
    """A process of an earlier life writes nothing."""
    old = single(tmp_path)
    old.resume_point(False)
    old.save(10, text)
    new = single(tmp_path)
    assert new.resume_point().step == 10
    with pytest.raises(Superseded, match="belongs to a later life"):
        leave(old, 13)
    with pytest.raises(Superseded):
        old.save(20, text)
    assert names(tmp_path) == ["checkpoint-10"]
    for step in (20, 30, 40):
        new.save(step, text)
    leave(new, 41)
    old.common = 99
    old._rotate()
    assert list(new.whole()) == [30, 40, 41]


def test_save_lock_taken_before_rename(tmp_path):
    """A save whose lock is taken before its folder gets its name is refused."""
    old = single(tmp_path)
    with pytest.raises(Superseded):
        old.save(10, lambda folder: lambda: single(tmp_path).resume_point())
    assert list(old.whole()) == []

    def late(*of):
        sealed(*of)
        Fence(tmp_path, "later").take(Ranks(None, 0, 1))

    sealed, third = folders.seal, single(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "seal", late)
        with pytest.raises(Superseded):
            third.save(10, text)
    # whole, but for its manifest: nobody gives it the name
    assert single(tmp_path).resume_point() is None
    (tmp_path / LOCK).unlink()  # gone hinders nobody
    old.save(20, text)
    assert list(old.whole()) == [20]


def test_resume_nothing_found_names_folder(tmp_path, caplog):
    """A resume that finds nothing says where it looked."""
    assert single(tmp_path / "typo").resume_point() is None
    assert f"looked in {tmp_path / 'typo'}: begins at step 0" in caplog.text
    caplog.clear()
    for resume in ("auto", False):
        assert single(tmp_path / "new").resume_point(resume) is None
    assert not caplog.text


def test_resume_refused_start_leaves_folder(tmp_path):
    """A refused start does not take the folder."""
    running = single(tmp_path)
    running.save(10, text)
    with pytest.raises(NeedsDecision, match="go on from there"):
        single(tmp_path).resume_point(resume=False)
    running.save(20, text)
    assert list(running.whole()) == [10, 20]


# -- a store that does not answer ----------------------------------------------------------------

SERVE = """
from fsdp_demo.store.server import StoreServer
store = StoreServer("127.0.0.1:0", ":memory:")
print(store.port, flush=True)
store.serve_while(lambda: True)
"""


def test_save_with_frozen_store(tmp_path, monkeypatch, caplog):
    """A frozen store stops no save and no signal. The store's process is stopped (SIGSTOP): it
    accepts and stays silent. Saves go on, and SIGTERM is served meanwhile.
    """
    caplog.set_level(logging.WARNING, "fsdp_demo")
    served = []
    old = signal.signal(signal.SIGTERM, lambda *_: served.append(1))
    store = subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    try:
        where = f"127.0.0.1:{store.stdout.readline().strip()}"
        topology = fsdp_demo.Topology("islands", 0, 2, endpoint=where, timeout=30.0, run="r")
        kept = CheckpointManager(tmp_path, topology)
        kept.save(1, text)
        assert "does not answer" not in caplog.text
        store.send_signal(signal.SIGSTOP)
        os.waitpid(store.pid, os.WUNTRACED)  # it stands from here on
        monkeypatch.setattr("fsdp_demo.checkpoint.registry.PATIENCE", 0.2)
        monkeypatch.setattr("fsdp_demo.checkpoint.registry.QUIET", 0.0)
        asked = CheckpointRegistry.exchange

        def told(self, held):
            os.kill(os.getpid(), signal.SIGTERM)
            return asked(self, held)

        monkeypatch.setattr(CheckpointRegistry, "exchange", told)
        kept.save(2, text)
        assert served == [1] and "no old checkpoint is removed: the store at" in caplog.text
        for step in range(3, 6):
            kept.save(step, text)
        assert list(kept.whole()) == [1, 2, 3, 4, 5]
        store.send_signal(signal.SIGCONT)
        caplog.clear()
        monkeypatch.setattr("fsdp_demo.checkpoint.registry.PATIENCE", 20.0)
        kept.save(7, text)
        assert caplog.text == ""
        kept.close()
    finally:
        signal.signal(signal.SIGTERM, old)
        store.kill()
        store.wait()


@pytest.mark.parametrize("how", ["part", "torch", "text"])
@in_ranks(1, 1)
def test_save_file_limit_is_full_disk(me, how):
    """The errors of writers at a limit of file size count as a full disk. No file may grow over 20
    kB: safetensors and torch.save have errors of their own.
    """
    kept, big = CheckpointManager(me.folder / "home", fsdp_demo.Topology()), torch.ones(100_000)
    writers = {
        "part": lambda folder: write_part(folder, "rank0", {}, {"t": big}),
        "torch": lambda folder: torch.save(big, folder / "t.pt"),
        "text": lambda folder: (folder / "t.txt").write_text("x" * 100_000) and None,
    }
    kept.save(1, text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    kept.save(2, writers[how])
    with pytest.raises(OSError):
        kept.save(2, writers[how], last=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kept.save(3, writers[how])
    assert (kept.failed_saves, list(kept.whole())) == (1, [1, 3])


# -- one rank that torch has joined --------------------------------------------------------------


@pytest.mark.parametrize(("backend", "procs"), [("cuda:gloo", 1), ("cpu:gloo", 2)])
@in_ranks(1, group=False)
def test_save_replica_of_one_rank(me, backend: str, procs: int) -> None:
    """A replica of one rank saves by itself, by a thread. A group over GPUs alone copies nothing to
    the host, and the replicas of a mesh do not wait for each other.
    """
    where = f"file://{me.folder}/world"
    dist.init_process_group(backend, init_method=where, rank=me.rank, world_size=me.procs)
    topology = fsdp_demo.Topology()
    if procs > 1:
        topology = fsdp_demo.Topology.from_mesh(init_device_mesh("cpu", (me.procs,)))
    manager, folder = CheckpointManager(me.folder / "home", topology), me.folder / "weights"
    if me.rank == 0:
        save_tensors(folder, {"w": torch.ones(3)}, manager.group, wait=False)()
        assert any(folder.iterdir())
    dist.destroy_process_group()


@pytest.mark.parametrize("loop, found", [
    ({"loader": {5: None}}, r"'loader' has the key 5, of type int: a checkpoint keeps"),
    ({"loader": [b"a"]}, r"'loader\.0' is of type bytes: .* save it in a file beside"),
])  # fmt: skip
def test_save_state_not_json_refused(tmp_path, loop, found):
    """A value that JSON does not hold is refused in a sentence."""
    with pytest.raises(ValueError, match=found):
        write_part(tmp_path, "rank0", {}, loop)
    assert not list(tmp_path.iterdir())
