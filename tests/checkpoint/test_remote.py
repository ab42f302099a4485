"""Copies of checkpoints in a store of objects, `memory://` and `file://`: whole or not there, by
which life, what a resume takes, and what rotation removes here and there. A real S3: test_s3.py.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
import time

import pytest

pytest.importorskip("fsspec")

import fsdp_demo
from fsdp_demo import status
from fsdp_demo.checkpoint import CheckpointManager, remote, uploads
from fsdp_demo.checkpoint.folders import GIVEN_UP, MANIFEST
from fsdp_demo.checkpoint.remote import ObjectStore
from fsdp_demo.errors import NeedsDecision, Superseded

from ..support.inside import in_ranks


def single(folder, url, keep=2, **place):
    return CheckpointManager(folder, fsdp_demo.Topology(timeout=5.0, **place), keep, remote=url)


def write(text="x"):
    return lambda folder: (folder / "a.txt").write_text(text) and None


def saved(kept, *steps, text="s"):
    for step in steps:
        kept.save(step, write(f"{text}{step}"))
        kept.copies.uploads.flush()


def there(kept):
    """Steps that are whole in the store, and the names of all that is there."""
    names = {key.split("/")[0] for key in kept.copies.remote.store.sizes()} - {".lives"}
    steps = [held.step for held in kept.copies.remote.scan().values() if held is not None]
    return sorted(steps), sorted(names)


@pytest.fixture
def url(tmp_path):
    """An address in memory that no other test has."""
    return f"memory://bucket{tmp_path}"


@pytest.fixture
def store(monkeypatch):
    """What each call to a store does first: `store.before(what, key)`, which may raise."""

    class Calls:
        before = staticmethod(lambda what, key: None)

    tried = ObjectStore._do

    def do(self, ask, key, *given, **named):
        def asked(at, *given, **named):
            Calls.before(getattr(ask, "__name__", ""), key)
            return ask(at, *given, **named)

        return tried(self, asked, key, *given, **named)

    monkeypatch.setattr(ObjectStore, "_do", do)
    monkeypatch.setattr(remote, "AGAIN", 0.02)
    monkeypatch.setattr(uploads, "AGAIN", 0.02)
    monkeypatch.setattr(uploads, "LONGEST", 0.02)
    return Calls


def test_remote_addresses_are_checked(tmp_path, monkeypatch, url):
    """A root with :// is refused before a folder is made, as is an address that is none; a missing
    package is named with the command that installs it.
    """
    monkeypatch.chdir(tmp_path)
    for root in ("s3://bucket/run", "file:///run"):
        with pytest.raises(ValueError, match="is no local folder.*remote= .ISLAND_REMOTE."):
            CheckpointManager(root, fsdp_demo.Topology())
    with pytest.raises(ValueError, match="ISLAND_REMOTE='bucket': it must be an address with ://"):
        single(tmp_path / "a", "bucket")
    monkeypatch.setenv("ISLAND_REMOTE", url)
    kept = CheckpointManager(tmp_path / "a", fsdp_demo.Topology())
    assert kept.copies.remote.url == f"{url}/island0"
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ValueError, match=r"pip install 'fsdp_demo\[cloud\]'"):
        CheckpointManager(tmp_path / "a", fsdp_demo.Topology())
    assert not list(tmp_path.glob("s3*"))


def test_remote_resume_without_local_folder(tmp_path, url, caplog):
    """Where the local folder is gone a resume takes the newest whole checkpoint of the store, puts
    it into the folder as a save does, and says where it was.
    """
    caplog.set_level(logging.INFO)
    kept = single(tmp_path / "a", url)
    saved(kept, 1, 2, 3)
    kept.close()
    shutil.rmtree(tmp_path / "a")
    again = single(tmp_path / "b", url)
    with pytest.raises(NeedsDecision, match=r"holds checkpoints of steps \[1?,? ?2, 3\]"):
        again.resume_point(resume=False)
    point = again.resume_point()
    assert (point.step, (point.folder / "a.txt").read_text()) == (3, "s3")
    assert list(again.whole()) == [3] and f"step 3 of {url}/island0" in caplog.text
    again.verify(point.folder)
    saved(again, 4)
    assert there(again)[0][-2:] == [3, 4]
    again.close()


def test_remote_newest_of_both_places(tmp_path, url, caplog):
    """The newer of both places counts; of one step that of the later life, on whichever disk an
    older one has left another.
    """
    caplog.set_level(logging.INFO)
    old = single(tmp_path / "a", url)
    saved(old, 10)
    old.close()
    other = single(tmp_path / "b", url)
    assert other.resume_point().step == 10
    saved(other, 20, text="later ")
    other.close()
    stale = single(tmp_path / "a", url)
    stale.held()
    (tmp_path / "a/checkpoint-20").mkdir()
    for name in ("a.txt", MANIFEST):
        shutil.copy(tmp_path / "a/checkpoint-10" / name, tmp_path / "a/checkpoint-20" / name)
    point = stale.resume_point()
    assert (point.step, (point.folder / "a.txt").read_text()) == (20, "later 20")
    ahead = single(tmp_path / "left", "")
    ahead.save(30, write("local"))
    assert single(tmp_path / "left", url).resume_point().folder == ahead.path(30)
    assert f"goes on from step 30 of {tmp_path / 'left'}" in caplog.text


@pytest.mark.parametrize("harm", ["no manifest", "no file", "cut", "torn manifest", "outside"])
def test_remote_half_is_not_whole(tmp_path, url, harm, caplog):
    """What is not complete in the store is left out, and what is before it taken."""
    kept = single(tmp_path / "a", url)
    saved(kept, 1, 2)
    (part,) = [
        k for k in kept.copies.remote.store.sizes() if k.startswith("checkpoint-2") and "a.txt" in k
    ]
    seal = part.replace("a.txt", MANIFEST)
    manifest = json.loads(kept.copies.remote.store.read(seal))
    manifest["files"]["../../x"] = manifest["files"]["a.txt"]
    {
        "no manifest": lambda: kept.copies.remote.store.remove(seal),
        "no file": lambda: kept.copies.remote.store.remove(part),
        "cut": lambda: kept.copies.remote.store.write(part, b"s"),
        "torn manifest": lambda: kept.copies.remote.store.write(seal, b'{"version": 1, "st'),
        "outside": lambda: kept.copies.remote.store.write(seal, json.dumps(manifest).encode()),
    }[harm]()
    point = single(tmp_path / "b", url).resume_point()
    assert (point.step, (point.folder / "a.txt").read_text()) == (1, "s1")
    assert harm == "no manifest" or "left out" in caplog.text


def test_remote_damaged_object_is_fetched_again(tmp_path, url, store, monkeypatch):
    """An object that comes with other bytes is fetched again, and nothing is sealed with it."""
    kept = single(tmp_path / "a", url)
    saved(kept, 1)
    good, got = ObjectStore.get, []

    def get(self, key, file, fits):
        def looked():
            got.append(key)
            if len(got) < 3:
                file.write_text("??")
            return fits()

        return good(self, key, file, looked)

    monkeypatch.setattr(ObjectStore, "get", get)
    again = single(tmp_path / "b", url)
    assert (again.resume_point().folder / "a.txt").read_text() == "s1" and len(got) == 3
    monkeypatch.setattr(
        ObjectStore, "get", lambda *of: good(*of[:3], lambda: of[2].write_text("??") and of[3]())
    )
    for manager in (single(tmp_path / "c", url, run="other"), single(tmp_path / "c", url)):
        manager.topology.timeout = 0.3
        with pytest.raises(OSError, match="not come as it was saved"):
            manager.resume_point()
        assert not manager.whole()


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_remote_cut_off_anywhere(tmp_path, store, scheme):
    """A life that dies at any call to the store, or in the middle of a file, leaves the checkpoint
    before, or the new one, whole: never a half, and never none.
    """
    seen, cut = set(), 0
    while True:
        url, left = f"{scheme}://{tmp_path}/store{cut}", [cut]

        store.before = staticmethod(lambda what, key: None)
        dead = single(tmp_path / f"a{cut}", url, keep=1)

        def before(what, key, left=left, thread=dead.copies.uploads):
            if left[0] == 0:
                thread._superseded = "dead"
                with thread._changed:
                    thread._changed.notify_all()
                raise OSError("dead")
            left[0] -= 1

        saved(dead, 1)
        store.before = staticmethod(before)
        saved(dead, 2)
        store.before = staticmethod(lambda what, key: None)
        again = single(tmp_path / f"b{cut}", url, keep=1)
        point = again.resume_point()
        assert (point.folder / "a.txt").read_text() == f"s{point.step}"
        saved(again, 3)
        assert there(again)[0][-1] == 3
        seen.add(point.step)
        cut += 1
        if left[0] > 0:
            break
    assert seen == {1, 2} and cut > 3


def test_remote_put_cut_in_the_middle(tmp_path, store, monkeypatch):
    """A file that is cut while it is written (a store without atomic objects) is written anew by
    the next attempt, and its checkpoint is not whole before.
    """
    url, whole = f"file://{tmp_path}/store", ObjectStore.put
    cuts = [1, 1]

    def put(self, file, key):
        if cuts:
            cuts.pop()
            self.write(key, file.read_bytes()[:1])
            raise OSError("cut")
        whole(self, file, key)

    monkeypatch.setattr(ObjectStore, "put", put)
    kept = single(tmp_path / "a", url)
    kept.save(1, write("long"))
    kept.copies.uploads.flush()
    assert (single(tmp_path / "b", url).resume_point().folder / "a.txt").read_text() == "long"


def test_remote_older_life_is_superseded(tmp_path, url, store):
    """A life whose successor has begun elsewhere uploads nothing more and ends at its next save;
    what it has sealed in between is taken back.
    """
    old = single(tmp_path / "a", url)
    saved(old, 1)
    new = single(tmp_path / "b", url)
    assert new.resume_point().step == 1
    saved(old, 2)
    assert there(new)[0] == [1]
    with pytest.raises(Superseded, match="belongs to a later life .000002-"):
        old.save(3, write())
    third = []

    def before(what, key):  # the successor begins between the look and the manifest
        if what == "pipe_file" and key.endswith(MANIFEST) and not third:
            third.append(single(tmp_path / "c", url))
            third[0].own(1)

    store.before = staticmethod(before)
    saved(new, 2)
    assert third and there(third[0])[0] == [1]


def test_remote_put_aside_as_here(tmp_path, url):
    """What is newer than the step that a life goes on from is held again until that life has a
    checkpoint of its own that all hold, and removed then; what a person has given up stays away.
    """
    kept = single(tmp_path / "a", url, keep=None)
    saved(kept, 1, 2, 3)
    second = single(tmp_path / "b", url, keep=9)
    second.own(1)
    assert [h.step for h in single(tmp_path / "c", url).held()] == [1, 2, 3]
    second = single(tmp_path / "b", url, keep=9)
    second.own(1)
    saved(second, 5)
    saved(second, 6)
    assert [h.step for h in single(tmp_path / "c", url).held()] == [1, 5, 6]
    person = single(tmp_path / "d", url)
    person.own(5, given_up=True)
    assert [h.step for h in single(tmp_path / "c", url).held()] == [1, 5]
    assert any(key.endswith(GIVEN_UP) for key in person.copies.remote.store.sizes())


def test_remote_place_of_another_island(tmp_path, url):
    """Two islands never share a prefix: equal names are refused."""
    single(tmp_path / "a", url, run="r").own()
    with pytest.raises(NeedsDecision, match="also the place of island 0 of run 'r'"):
        single(tmp_path / "b", url, run="r", island=1).own()
    single(tmp_path / "b", url, run="another", island=1).own()


def test_remote_rotation_in_the_store(tmp_path, url):
    """As many stay there as here, with the best, and no half of before."""
    kept = single(tmp_path / "a", url)
    kept.own()
    kept.copies.remote.store.write("checkpoint-1/000000-dead00-000001/rank0/a.txt", b"half")
    kept.spare(2)
    saved(kept, 2, 3, 4, 5, 6)
    assert there(kept)[0] in ([2, 4, 5, 6], [2, 5, 6])
    assert "checkpoint-1" not in there(kept)[1]
    assert list(kept.whole()) == [2, 5, 6]


def test_remote_tag_saved_anew(tmp_path, url):
    """A name that is saved anew has a key of its own, and the newer one counts."""
    kept = single(tmp_path / "a", url, keep=None)
    for step in (1, 2):
        kept.save(step, write(f"s{step}"), name="newest")
        kept.copies.uploads.flush()
    again = single(tmp_path / "b", url)
    point = again.resume_point()
    assert (point.step, point.folder.name) == (2, "newest")
    assert (point.folder / "a.txt").read_text() == "s2"
    assert there(again) == ([2], ["newest"])


def test_remote_store_down_for_long(tmp_path, url, store, caplog):
    """While nothing can be uploaded training goes on, rotation spares up to keep + 2 here and says
    so, what goes goes with a warning, and the rest follows when the store is back.
    """
    kept = single(tmp_path / "a", url)
    saved(kept, 1, 2)
    down = [True]

    def before(what, key):
        if down[0]:
            raise OSError("no such host")

    store.before = staticmethod(before)
    for step in range(3, 9):
        kept.save(step, write(f"s{step}"))
    assert list(kept.whole()) == [3, 6, 7, 8]  # 3 is under way
    text = caplog.text
    assert "upload failed (OSError: no such host); training goes on" in text
    assert "kept for their upload, which fails: OSError: no such host" in text
    assert "[4] are deleted without one" in text or "[5] are deleted without one" in text
    down[0] = False
    kept.copies.uploads.flush()
    assert there(kept)[0][-3:] == [6, 7, 8]
    kept.save(9, write())
    kept.close()
    assert list(kept.whole()) == [8, 9]


def test_remote_asked_at_the_start(tmp_path, url, store, caplog):
    """A store that fails at first is asked again; one that stays away ends the start by name."""
    saved(single(tmp_path / "a", url), 1)
    fails = [3]

    def before(what, key):
        if fails[0]:
            fails[0] -= 1
            raise OSError("500")

    store.before = staticmethod(before)
    assert single(tmp_path / "b", url).resume_point().step == 1 and "tried again" in caplog.text
    fails[0] = -1
    away = single(tmp_path / "c", url)
    away.topology.timeout = 0.2
    with pytest.raises(
        OSError, match="island0 cannot be used .OSError: 500.: mend that, or leave it out"
    ):
        away.resume_point()


def test_remote_ends_by_the_deadline(tmp_path, url, store, monkeypatch, caplog):
    """A process that is told to end uploads the newest first, and as long as it may live; the log
    names what is left, and the next start with that folder uploads it.
    """
    held, monkey = threading.Event(), []

    def before(what, key):
        if what == "<lambda>":  # put
            monkey.append(key)
            held.wait(30)

    store.before = staticmethod(before)
    kept = single(tmp_path / "a", url)
    for step in (1, 2, 3):
        kept.save(step, write(f"s{step}"))
    monkeypatch.setattr(status, "_ends_at", time.monotonic() + 1.3)
    kept.upload_rest()
    assert "steps [1, 2, 3] are not in" in caplog.text and "no time was left" in caplog.text
    monkeypatch.setattr(status, "_ends_at", float("inf"))
    with kept.copies.uploads._changed:
        kept.copies.uploads._hurry = True
    held.set()
    while len(monkey) < 2:
        time.sleep(0.01)
    assert monkey[1].startswith("checkpoint-3/")
    kept.copies.uploads.flush()
    store.before = staticmethod(lambda what, key: None)
    kept.copies.remote.store.remove("checkpoint-3")
    again = single(tmp_path / "a", url)
    assert again.resume_point().step == 3
    again.copies.uploads.flush()
    assert 3 in there(again)[0]
    shutil.rmtree(tmp_path / "a")
    assert single(tmp_path / "b", url).resume_point().step == 3


def test_remote_exit_waits_for_uploads(tmp_path, programs=None):
    """A script that ends without a word more has uploaded what it has saved."""
    import subprocess

    script = f"""
import fsdp_demo, time
from fsdp_demo.checkpoint import CheckpointManager
from fsdp_demo.checkpoint.remote import ObjectStore
put = ObjectStore.put
ObjectStore.put = lambda *given: time.sleep(0.5) or put(*given)
kept = CheckpointManager({str(tmp_path / "a")!r}, fsdp_demo.Topology(), remote="file://{tmp_path}/s")
kept.save(7, lambda folder: (folder / "a.txt").write_text("x") and None)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert single(tmp_path / "b", f"file://{tmp_path}/s").resume_point().step == 7


@in_ranks(1, 2)
def test_remote_nodes_with_a_disk_each(me):
    """Nodes without a common disk upload their own files; a checkpoint counts that has all parts,
    each node gets its own back, another number of nodes all, and rotation deletes on each.
    """
    url = f"file://{me.folder}/store"

    def manager(life, ranks=None):
        where = me.folder / f"disk{me.proc}-{life}"
        return CheckpointManager(where, fsdp_demo.Topology.from_env(), remote=url)

    def write(folder):
        (folder / f"rank{me.proc}.txt").write_text(f"{folder.name} of {me.proc}")
        (folder / "same.txt").write_text(f"of {me.proc}")

    kept = manager(1)
    for step in (1, 2, 3, 4):
        kept.save(step, write)
        kept.upload_rest()
    kept.ranks.any(False)
    assert list(kept.whole()) == [3, 4]
    keys = [key for key in kept.copies.remote.store.sizes() if "rank" in key]
    parts = {tuple(key.split("/")[i] for i in (0, 2)) for key in keys}
    assert {("checkpoint-4", "rank0"), ("checkpoint-4", "rank1")} <= parts
    assert not any(name in ("checkpoint-1",) for name, _ in parts)
    again = manager(2)
    point = again.resume_point()
    files = sorted(p.name for p in point.folder.glob("*.txt"))
    assert (point.step, files) == (4, [f"rank{me.proc}.txt", "same.txt"])
    assert (point.folder / "same.txt").read_text() == f"of {me.proc}"
    again.verify(point.folder)
    lost = [k for k in keys if k.startswith("checkpoint-4") and "rank1/m" in k]
    again.ranks.any(False)
    if me.proc == 0:
        kept.copies.remote.store.remove(lost[0])
    again.ranks.any(False)
    third = manager(3)
    assert third.resume_point().step == 3
    third.ranks.any(False)
    if me.proc == 0:  # one node, two ranks before
        topology = fsdp_demo.Topology(name="island0")
        alone = CheckpointManager(me.folder / "alone", topology, remote=url)
        alone.group, folder = None, alone.resume_point().folder
        assert len(list(folder.glob("rank*.txt"))) == 2
        alone.copies.uploads.flush()
        assert 3 in [held.step for held in alone.copies.remote.scan().values() if held]
    third.ranks.any(False)


@in_ranks(2, 1)
def test_remote_islands_agree(me):
    """Islands agree on what all hold, here or there: one has lost its disk, and brings the common
    step back; equal names in one store are refused.
    """
    url, topology = f"file://{me.folder}/store", fsdp_demo.Topology.from_env()

    def manager(life):
        return CheckpointManager(me.folder / f"disk{me.island}{life}", topology, remote=url)

    kept = manager("a")
    for step in (1, 2) if me.island else (1, 2, 3):
        kept.save(step, write(f"{step} of {me.island}"))
        kept.copies.uploads.flush()
        me.meet(step)
    if me.island:
        me.meet(3)
    again = manager("b" if me.island else "a")
    point = again.resume_point()
    assert (point.step, (point.folder / "a.txt").read_text()) == (2, f"2 of {me.island}")
    me.meet("named")
    topology.name = "one name"
    with pytest.raises(NeedsDecision, match="have one folder"):
        manager("c").resume_point("auto")


@in_ranks(1, 3)
def test_remote_ranks_share_the_download(me):
    """Ranks that see one folder upload it once, and each fetches a part of it."""
    topology, url = fsdp_demo.Topology.from_env(), f"file://{me.folder}/store"
    kept = CheckpointManager(me.folder / "a", topology, remote=url)
    kept.save(1, lambda folder: (folder / f"of{me.proc}").write_text(f"{me.proc}") and None)
    kept.upload_rest()
    again = CheckpointManager(me.folder / "b", topology, remote=url)
    fetched, get = [], again.copies.remote.store.get
    again.copies.remote.store.get = lambda *of: fetched.append(of[0]) or get(*of)
    point = again.resume_point()
    assert len(fetched) == 1
    assert [(point.folder / f"of{i}").read_text() for i in range(3)] == ["0", "1", "2"]
    again.verify(point.folder)
