"""Copies of checkpoints in a real S3 (moto on loopback) that answers 500, slowly, and not at all,
and processes that are killed in the middle of an upload: nothing is lost, no half taken for whole.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, remote, uploads

from ..support.s3 import S3

SAVER = """
import os, sys, fsdp_demo
from pathlib import Path
from fsdp_demo.checkpoint import CheckpointManager
kept = CheckpointManager(Path(sys.argv[1]), fsdp_demo.Topology())
kept.resume_point("auto")
def write(folder):
    for i in range(6):
        (folder / f"part{i}").write_bytes(bytes([step, i]) * (300 << 10))
for step in map(int, sys.argv[2:]):
    kept.save(step, write)
    print(step, flush=True)
kept.finish()
"""

LOOP = """
import sys, time, torch, fsdp_demo
from pathlib import Path
from fsdp_demo.checkpoint import CheckpointManager, RunState
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.AdamW(model.parameters())
topology = fsdp_demo.Topology.from_env()
state = RunState(CheckpointManager(Path(sys.argv[1]), topology), model, optimizer)
state.restore("auto")
exchange = fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology, step=state.step, state=state.saved)
print("from", state.step, flush=True)
with fsdp_demo.guard(exchange, save=lambda: state.save(exchange, last=True)):
    while exchange.step < int(sys.argv[2]):
        model(torch.ones(1, 512)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print("step", exchange.step, flush=True)
        time.sleep(0.05)
    exchange.finish()
state.finish()
"""  # noqa: E501


@pytest.fixture
def s3(monkeypatch):
    served = S3()
    for name, value in {**served.env, "ISLAND_COUNT": "1", "ISLAND_REMOTE": served.url}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "AGAIN", 0.1)
    monkeypatch.setattr(uploads, "AGAIN", 0.1)
    monkeypatch.setattr(uploads, "LONGEST", 0.1)
    yield served
    served.close()


def manager(folder):
    return CheckpointManager(folder, fsdp_demo.Topology(timeout=60.0))


def write(folder):
    for i in range(3):
        (folder / f"part{i}").write_bytes(bytes([i]) * 70_000)


def parts(folder, step):
    """Whether the files of SAVER are there as they were written."""
    return all(
        (folder / f"part{i}").read_bytes() == bytes([step, i]) * (300 << 10) for i in range(6)
    )


def start(script, *words, **env):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        **{"env": {**os.environ, **env}, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT},
        **{"text": True, "cwd": Path(__file__).parents[2]},
    )


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_s3_answers_500(s3, tmp_path, share, caplog):
    """While answers are errors, all or some, training goes on, and all is uploaded in the end; a
    resume gets through, too.
    """
    kept = manager(tmp_path / "a")
    kept.own()
    s3.fail(share)
    for step in (1, 2, 3):
        assert kept.save(step, write)
    while share == 1 and "upload failed" not in caplog.text:
        time.sleep(0.05)
    if share == 1:
        assert kept.copies.remote.known == []
        s3.well()
    kept.close()
    s3.well()
    assert {h.step for h in kept.copies.remote.scan().values() if h} >= {2, 3}
    s3.fail(0.3)
    point = manager(tmp_path / "b").resume_point()
    assert point.step == 3 and (point.folder / "part2").read_bytes() == bytes([2]) * 70_000


def test_s3_does_not_answer(s3, tmp_path, monkeypatch):
    """A store that takes connections and says nothing does not hold up training; what waits is
    uploaded when it speaks again. The deadline of a stop ends the wait.
    """
    monkeypatch.setattr("s3fs.S3FileSystem.read_timeout", 2)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    kept = manager(tmp_path / "a")
    kept.own()
    s3.relay.hold()
    for step in (1, 2):
        assert kept.save(step, write)
    monkeypatch.setattr("fsdp_demo.status._ends_at", time.monotonic() + 1.5)
    kept.upload_rest()
    assert list(kept.copies.uploads._waiting) == [1, 2]
    monkeypatch.setattr("fsdp_demo.status._ends_at", float("inf"))
    s3.well()
    kept.close()
    assert manager(tmp_path / "b").resume_point().step == 2


@pytest.mark.slow
def test_s3_killed_in_mid_upload(s3, tmp_path):
    """A process that is killed by SIGKILL at any place of its upload leaves the step before in the
    store, or the new one, byte for byte, and the newest on its own disk; the next start on another
    machine goes on from there.
    """
    first = start(SAVER, tmp_path / "a", 1)
    assert first.wait(120) == 0, first.stdout.read()
    found, whole, limits = set(), 1, [200_000, 1_700_000, 3_000_000, 3_650_000]
    for number, limit in enumerate(limits):
        step, sent = whole + 1, s3.relay.forth
        s3.relay.wait = 0.01
        folder = tmp_path / f"machine{number}"
        life = start(SAVER, folder, step)
        while s3.relay.forth - sent < limit and life.poll() is None:
            time.sleep(0.002)
        life.kill()
        life.wait()
        s3.well()
        again = manager(tmp_path / f"after{number}")
        point = again.resume_point()
        assert point.step in (whole, step) and parts(point.folder, point.step)
        again.close()
        if (folder / f"checkpoint-{step}" / "manifest.json").exists():  # its machine comes back
            back = manager(folder)
            assert back.resume_point().step == step
            back.close()
        found.add(point.step - whole)
        whole = point.step
    assert 0 in found


@pytest.mark.slow
def test_s3_sigterm_with_a_slow_store(s3, tmp_path):
    """SIGTERM: the local checkpoint comes first, the upload takes what is left of ISLAND_STOP, and
    the process ends in time with status 75; its next start uploads it. With a store that is fast
    enough it is there at the end.
    """

    def stop(folder, **env):
        life = start(LOOP, folder, 10_000, **env)
        for line in life.stdout:
            if line.startswith("step") and int(line.split()[1]) % 5 == 4:
                break
        life.send_signal(signal.SIGTERM)
        said = " ".join(life.stdout.read().split())
        return life.wait(120), said

    s3.relay.wait = 0.4  # per piece, of some fifty
    status, said = stop(tmp_path / "a", ISLAND_STOP="5")
    assert status == 75, said
    assert "are not in s3://" in said and ": saved" in said, said
    s3.well()
    (local,) = (tmp_path / "a").glob("checkpoint-*")
    assert manager(tmp_path / "other").resume_point("auto") is None
    status, said = stop(tmp_path / "a", ISLAND_STOP="60")
    assert status == 75 and "are not in s3://" not in said, said
    assert manager(tmp_path / "b").resume_point().step > int(local.name.split("-")[1])
