"""Other signals than SIGTERM that tell an island to end, and a cloud's notice."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_demo import Topology
from fsdp_demo.launch import __main__ as launch
from fsdp_demo.launch import notice
from fsdp_demo.launch.processes import descendants, send
from fsdp_demo.rendezvous.environment import stop_signals

from .rehearsals import ON_LINUX

SCRIPT = """
import pathlib, sys, time
import torch, fsdp_demo

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
exchange = fsdp_demo.attach(optimizer, "local_sgd", model=model)
rows = torch.utils.data.DataLoader([torch.ones(4)] * 10**6, num_workers=1)
with fsdp_demo.guard(exchange, save=lambda: print("saved", exchange.step, flush=True)):
    for row in rows:
        model(row).sum().backward()
        time.sleep(0.3)  # here a worker that has died is noticed
        optimizer.step()
        if exchange.step == 3:
            pathlib.Path(sys.argv[1], "ready").touch()
"""


def _ends(folder: Path, act: str) -> tuple[int, str]:
    """Status and output of an island of one rank, once `act` has told it to end."""
    (folder / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "fsdp_demo.launch"]
    words += ["--restarts", "2"] * (act != "rank")  # which may come back otherwise
    words += ["--notice", f"test -e {folder}/taken"] * (act == "notice")
    words += ["torchrun", "--standalone", "--nproc-per-node", "1"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")}
    env |= {"ISLAND_STOP_SIGNALS": "USR1, sigusr2", "ISLAND_COUNT": "1"}
    process = subprocess.Popen(
        [*words, str(folder / "train.py"), str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        end = time.monotonic() + 100
        while not (folder / "ready").exists() and time.monotonic() < end:
            time.sleep(0.05)
        below = descendants(process.pid)
        if act == "launcher":
            process.send_signal(signal.SIGUSR1)
        elif act == "all":  # launchers, the rank, its loader's worker
            send([process.pid, *below], signal.SIGUSR1)
        elif act == "rank":
            send(below[-2:-1], signal.SIGUSR2)  # behind it comes the worker
        elif act == "notice":
            (folder / "taken").touch()
        output, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, output


@ON_LINUX
@pytest.mark.timeout(300)
@pytest.mark.parametrize("act", [
    pytest.param("launcher", marks=pytest.mark.slow), "all", "rank",
    pytest.param("notice", marks=pytest.mark.slow),
])  # fmt: skip
def test_stop_signals_end_an_island_with_75(tmp_path: Path, act: str) -> None:
    """An island that one of ISLAND_STOP_SIGNALS or a notice tells to end saves once, ends with 75
    and is not started again, whoever gets the signal; a worker of a loader lives on until then.
    """
    status, output = _ends(tmp_path, act)
    assert status == 75 and output.count("\nsaved ") == 1, output
    assert "exited unexpectedly" not in output and "; restart" not in output


HOLDS = """
import torch
from fsdp_demo.exchange.guard import stop_signals

rows = torch.utils.data.DataLoader([1, 2], num_workers=1, persistent_workers=True)
with stop_signals(lambda: True):
    held = iter(rows)
    next(held)
    print(held._workers[0].pid, flush=True)
    input()
    next(held)
"""


@ON_LINUX
@pytest.mark.timeout(120)
def test_stop_signals_leave_workers_to_their_rank() -> None:
    """A loader's worker does not hear SIGTERM of others, but that of its rank: a rank that has
    workers at its exit, as with persistent_workers, ends.
    """
    words = [sys.executable, "-c", HOLDS]
    rank = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdin is not None and rank.stdout is not None
        worker = int(rank.stdout.readline())
        os.kill(worker, signal.SIGTERM)
        rank.communicate("\n", timeout=60)
    finally:
        send([*descendants(rank.pid), rank.pid], signal.SIGKILL)
    assert rank.returncode == 0 and not Path(f"/proc/{worker}").exists()


def test_stop_signals_are_checked(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """SIGTERM is always one; what cannot be handled is refused, at the launch, too."""
    assert stop_signals({}) == [signal.SIGTERM]
    found = stop_signals({"ISLAND_STOP_SIGNALS": "term,USR1"})
    assert found == [signal.SIGTERM, signal.SIGUSR1]
    with pytest.raises(ValueError, match="ISLAND_STOP_SIGNALS='KILL': KILL is none of TERM, INT"):
        Topology.from_env({"ISLAND_STOP_SIGNALS": "KILL"})
    monkeypatch.setenv("ISLAND_STOP_SIGNALS", "USR3")
    with pytest.raises(SystemExit):
        launch.main(["torchrun", "train.py"])
    assert "USR3 is none of TERM" in capsys.readouterr().err


class _Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata services of AWS (version 2) and Google, of one machine."""

    taken = False

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self._answer(200, "secret")

    def do_GET(self) -> None:
        if self.path == "/latest/meta-data/spot/instance-action":
            assert self.headers["X-aws-ec2-metadata-token"] == "secret"
            self._answer(200 if self.taken else 404, '{"action": "terminate"}')
        elif self.path == "/computeMetadata/v1/instance/preempted":
            assert self.headers["Metadata-Flavor"] == "Google"
            self._answer(200, "TRUE" if self.taken else "FALSE")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Metadata]]:
    """Both services on loopback."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{place}/")
        monkeypatch.setenv("GCE_METADATA_HOST", place)
        monkeypatch.setattr(_Metadata, "taken", False)
        yield _Metadata
        server.shutdown()


@pytest.mark.parametrize("source", ["aws", "gcp"])
def test_notice_of_a_cloud(metadata, source: str) -> None:
    """SIGTERM comes when the cloud says that the machine is taken away, and not before."""
    told: list[int] = []
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        assert not told
        pauses.append(seconds)
        metadata.taken = len(pauses) == 3

    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    try:
        notice.wait(source, pause)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told == [signal.SIGTERM] and pauses == [5.0] * 3


@pytest.mark.parametrize(("source", "text"), [
    ("gcp", "--notice gcp cannot be asked (<urlopen error"),
    pytest.param("exit 3", "", marks=pytest.mark.launch),
])  # fmt: skip
def test_notice_that_does_not_come(capsys, monkeypatch, source: str, text: str) -> None:
    """Where no service answers, a sentence says so once; nothing ends, as where a command fails."""
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        notice.wait(source, pause)
    said = capsys.readouterr().err
    assert said.count("cannot be asked") == (1 if text else 0) and text in said
