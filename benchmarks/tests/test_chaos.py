"""The storm over islands: its plan, its relays, its arithmetic, its picture; and whole storms."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import chaos
from benchmarks.chaos_events import KINDS, Storm, plan
from benchmarks.chaos_facts import Tape, at_tokens, draw_storm, spans
from benchmarks.chaos_relay import Delay, Links, address

SCRIPT = Path(__file__).parents[1] / "chaos.py"

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="addresses in 127.0.0.0/8 and /proc"
    ),
]
KEYS = {
    "events",
    "by_kind",
    "survived",
    "longest_stall_s",
    "rejoin_s",
    "rounds_repeated",
    "committed_share",
    "participating_share",
}
KEYS |= {"digests_equal", "loss", "loss_undisturbed"}


# ---- plan and words ----------------------------------------------------------------------------


def test_chaos_plan_has_each_kind_equally_often() -> None:
    """A seed gives one plan, with every kind as often as any other."""
    events = plan(2 * len(KINDS), list(KINDS), 6.0, 3)
    assert (
        events
        == plan(2 * len(KINDS), list(KINDS), 6.0, 3)
        != plan(2 * len(KINDS), list(KINDS), 6.0, 4)
    )
    assert sorted(e.kind for e in events) == sorted(2 * list(KINDS))
    assert all(1.2 <= e.gap <= 18.0 for e in events)
    assert 5.0 < sum(e.gap for e in plan(2000, ["stop"], 6.0, 1)) / 2000 < 6.5


@pytest.mark.parametrize(
    "words, message",
    [
        (["--kinds", "kill_island,flood"], "--kinds flood"),
        (["--islands", "1"], "--islands from 2"),
        (["--preset", "dmo"], "--preset"),
    ],
)
def test_chaos_wrong_words_are_one_line(monkeypatch, capsys, words, message) -> None:
    """Wrong words end the benchmark with one line."""
    monkeypatch.setattr(sys, "argv", ["chaos.py", *words])
    with pytest.raises(SystemExit) as end:
        chaos.main()
    err = capsys.readouterr().err
    assert end.value.code == 2 and message in err and len(err.splitlines()) == 1


def test_chaos_slow_store_is_stopped_three_times() -> None:
    """A slow store is stopped three times and goes on each time."""
    sent: list[int] = []
    lab = SimpleNamespace(
        store="this start",
        signal_store=lambda store, number: sent.append(number),
        note=lambda text: None,
    )
    (event,) = plan(1, ["slow_store"], 6.0, 1)
    storm = Storm(lab, [event], print)
    assert "three times" in storm._slow_store(event, 0) and event.over == float("inf")
    for _, job in sorted(storm.later, key=lambda entry: entry[0]):
        job()
    assert sent == [signal.SIGSTOP, signal.SIGCONT] * 3 and event.over < float("inf")


def test_chaos_far_store_answers_a_round_trip_later() -> None:
    """A far store answers a round trip later."""
    with socket.create_server(("127.0.0.1", 0)) as echo:
        way = Delay(echo.getsockname(), 0.05)
        with socket.create_connection(("127.0.0.1", way.port)) as near:
            far, _ = echo.accept()
            begin = time.monotonic()
            near.sendall(b"question")
            far.sendall(far.recv(64))
            assert near.recv(64) == b"question" and time.monotonic() - begin >= 0.1
            far.close()
            assert near.recv(64) == b""
        way.close()


def test_chaos_periods_are_short() -> None:
    """Periods of the presets are short enough for a storm."""
    assert chaos.settings("demo") == {} and chaos.settings("diloco") == {"period": 10}
    assert chaos.settings("streaming_diloco")["period"] == 20


# ---- relays ------------------------------------------------------------------------------------


@pytest.fixture
def relayed() -> Any:
    """(links, near end of island 0, far end of island 2) of one connection that island 0 has
    dialled.
    """
    links, server = Links(), socket.create_server((address(2), 0))
    with socket.create_connection(("127.0.0.1", links.port)) as door:
        door.sendall(
            json.dumps({"from": 0, "host": address(2), "port": server.getsockname()[1]}).encode()
            + b"\n"
        )
        port = int(door.makefile("rb").readline())
    near = socket.create_connection(("127.0.0.1", port))
    far, _ = server.accept()
    for end in (near, far):
        end.settimeout(10.0)
    near.sendall(b"-")
    assert far.recv(1) == b"-"  # from here on the relay knows the connection
    yield links, near, far
    for end in (near, far, server):
        end.close()
    links.close()


def _read(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := end.recv(count - len(data))):
        data += more
    return data


def test_chaos_relay_holds_one_way(relayed) -> None:
    """A relay holds one way of a connection, and the other one passes."""
    links, near, far = relayed
    links.hold((0, 2))
    near.sendall(b"there")
    far.sendall(b"back")
    assert _read(near, 4) == b"back"
    far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far.recv(1)
    far.settimeout(10.0)
    links.let_go((0, 2))
    assert _read(far, 5) == b"there"


def test_chaos_relay_held_twice_is_free_when_both_are_over(relayed) -> None:
    """A way that two faults hold is free when both are over."""
    links, near, far = relayed
    for _ in range(2):
        links.hold((0, 2))
    near.sendall(b"there")
    links.let_go((0, 2))
    far.settimeout(0.2)
    with pytest.raises(TimeoutError):
        far.recv(1)
    far.settimeout(10.0)
    links.let_go((0, 2))
    assert _read(far, 5) == b"there"


def test_chaos_relay_flips_one_bit(relayed) -> None:
    """One bit of something large is flipped and nothing else."""
    links, near, far = relayed
    links.flip((2, 0))
    far.sendall(b"beat")
    assert _read(near, 4) == b"beat"
    far.sendall(bytes(3000))
    data = _read(near, 3000)
    assert sum(bin(b).count("1") for b in data) == 1 and links.flipped[2, 0] == 1
    far.sendall(bytes(3000))
    assert not any(_read(near, 3000))


def test_chaos_relay_resets_a_pair(relayed) -> None:
    """Connections of a pair end by a reset."""
    links, near, far = relayed
    links.end((2, 0))
    for end in (near, far):
        try:
            assert end.recv(1) == b""
        except ConnectionResetError:
            pass


# ---- numbers -----------------------------------------------------------------------------------


def facts_of(
    islands: dict[tuple[int, int], tuple[range, float]], counted: Callable[[int], list[int]]
) -> list[dict[str, Any]]:
    """Steps of 1 s: for each (slot, life) its steps, and the second at which step 0 would have
    been.
    """
    facts: list[dict[str, Any]] = []
    for (slot, life), (steps, origin) in islands.items():
        same = {"slot": slot, "life": life, "rank": 0}
        for s in steps:
            at = origin + s
            if slot in counted(s):
                slots = {
                    "slots": counted(s),
                    "counted": counted(s),
                    "again": False,
                    "changed": False,
                }
                facts.append({"what": "message", "time": at, "n": s, "step": s, **slots, **same})
            facts.append({"what": "step", "time": at, "step": s + 1, "tokens": 10, **same})
            facts.append(
                {
                    "what": "look",
                    "time": at,
                    "step": s + 1,
                    "digest": f"d{s}",
                    "loss": 5.0 - s / 20,
                    **same,
                }
            )
        facts.append({"what": "start", "time": origin + steps[0] - 0.5, **same})
        facts.append(
            {"what": "attached", "time": origin + steps[0] - 0.2, "step": steps[0], **same}
        )
    return facts


def storm_of_one_kill() -> dict[str, Any]:
    """Island 1 is killed in second 20 and back from step 30 on. Island 0 steps on, after 3
    seconds.
    """
    islands = {
        (0, 0): (range(20), 0.0),
        (0, 0.5): (range(20, 40), 3.0),
        (1, 0): (range(20), 0.0),
        (1, 1): (range(30, 40), 3.0),
    }
    facts = facts_of(islands, lambda s: [0, 1] if s < 20 or s >= 30 else [0])  # type: ignore[arg-type]
    facts = [
        {**f, "life": int(f["life"])}
        for f in facts
        if not (f["life"] == 0.5 and f["what"] in ("start", "attached"))
    ]
    lives = [
        {"slot": 0, "life": 0, "began": -1.0, "ended": 50.0, "status": 0},
        {"slot": 1, "life": 0, "began": -1.0, "ended": 19.5, "status": 137},
        {"slot": 1, "life": 1, "began": 19.6, "ended": 50.0, "status": 0},
    ]
    event = {
        "kind": "kill_island",
        "victims": [1],
        "others": [0],
        "struck": 19.4,
        "over": 19.4,
        "lives": {"0": 0, "1": 0},
        "skipped": "",
    }
    return {"facts": facts, "lives": lives, "ends": 50.0, "events": [event], "trouble": ""}


def test_chaos_evaluates_one_kill() -> None:
    """The numbers of a storm of one kill are those worked out by hand."""
    calm = {
        "facts": facts_of({(s, 0): (range(40), 0.0) for s in (0, 1)}, lambda s: [0, 1]),
        "ends": 50.0,
        "events": [],
        "trouble": "",
    }
    calm["lives"] = [
        {"slot": s, "life": 0, "began": -1.0, "ended": 50.0, "status": 0} for s in (0, 1)
    ]
    found = chaos.evaluate(storm_of_one_kill(), calm)
    assert KEYS <= set(found)
    assert (found["events"], found["survived"], found["digests_equal"], found["rounds"]) == (
        1,
        1,
        True,
        40,
    )
    assert found["longest_stall_s"] == 4.0  # step 20 came 4 s after step 19
    assert found["rejoin_s"] == pytest.approx(33.0 - 19.4)
    assert found["committed_share"] == pytest.approx(70 / 80)
    # nobody was there when it did not take part
    assert found["participating_share"] == pytest.approx(1.0)
    assert chaos.good(found, restarts=True)
    assert found["loss_undisturbed"] == pytest.approx(5.0 - 34 / 20)  # at 700 tokens: 35 steps


def test_chaos_held_island_does_not_stall() -> None:
    """An island that the storm holds does not stall, though another event comes meanwhile."""
    held = {
        "kind": "stop",
        "victims": [1],
        "struck": 10.0,
        "over": 23.0,
        "lives": {"0": 0, "1": 0, "2": 0},
    }
    cut = {
        "kind": "cut_off",
        "victims": [0, 2],
        "struck": 10.4,
        "over": 10.4,
        "lives": {"0": 0, "1": 0, "2": 0},
    }
    gaps = [(1, 0, 9.9, 23.1), (2, 0, 10.3, 20.4), (1, 0, 40.0, 41.0)]
    assert chaos.stalls(SimpleNamespace(gaps=lambda: gaps), [held, cut]) == [
        0.0,
        pytest.approx(10.1),
    ]  # type: ignore[arg-type]


def test_chaos_finds_unequal_digests_and_a_stall() -> None:
    """A digest that differs and a survivor that stands still are found."""
    told = storm_of_one_kill()
    told["facts"] = [
        {**f, "digest": "x"} if (f["what"], f["slot"], f.get("step")) == ("look", 1, 35) else f
        for f in told["facts"]
    ]
    found = chaos.evaluate(told, None)
    assert (
        not found["digests_equal"]
        and "step 35" in found["mismatches"][0]
        and not chaos.good(found, True)
    )
    told = storm_of_one_kill()
    told["facts"] = [f for f in told["facts"] if f["time"] < 19.4]
    told["lives"][0] |= {"status": None, "ended": None}
    found = chaos.evaluate(told, None)
    assert found["survived"] == 0 and "island 0 stands still" in found["failures"][0]
    assert found["longest_stall_s"] == 50.0 - 19.0


def test_chaos_ignores_the_last_steps_of_an_expelled_island() -> None:
    """What an island did right before it was expelled does not count as a difference."""
    told = storm_of_one_kill()
    for f in told["facts"]:
        if f["slot"] == 1 and f["life"] == 0 and f.get("step") == 20 and f["what"] == "look":
            f["digest"] = "its own"
    assert chaos.evaluate(told, None)["digests_equal"]


def test_chaos_run_begun_anew_tells_steps_twice() -> None:
    """A run whose last member was killed begins anew: an island that tells of a step again tells of
    another run.
    """
    told = storm_of_one_kill()
    again = [
        {**f, "time": f["time"] + 100.0, "digest": "of another run"}
        for f in told["facts"]
        if f["slot"] == 0 and f["what"] == "look" and f["step"] <= 10
    ]
    again.append({**again[0], "what": "attached", "step": 0, "time": again[0]["time"] - 1.0})
    told["facts"] += again
    found = chaos.evaluate(told, None)
    assert found["digests_equal"] and found["begun_anew"] == 1, found["mismatches"]


def test_chaos_curve_between_its_points() -> None:
    """A curve is interpolated between its points."""
    assert at_tokens([(0, 4.0), (10, 2.0)], 5) == 3.0 and at_tokens([(0, 4.0)], 5) is None


def test_chaos_picture_is_drawn_from_the_facts() -> None:
    """The picture is drawn from the facts of the storm."""
    pytest.importorskip("matplotlib")
    told = storm_of_one_kill()
    tape = Tape(told["facts"], told["lives"], told["ends"])
    states = [state for state, *_ in spans(tape, 1, 0.0)]
    assert states[0] == "training" and "joining" in states
    out = io.StringIO()
    draw_storm(tape, told["events"], 2, "a < b", out)
    root = xml.fromstring(out.getvalue())
    texts = {node.text for node in root.iter()}
    assert root.tag.endswith("svg") and {"a < b", "kill_island", "island 1"} <= texts


# ---- storms ------------------------------------------------------------------------------------


def _storm(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    out = folder / "found.json"
    command = [
        sys.executable,
        str(SCRIPT),
        "--json",
        str(out),
        "--keep",
        str(folder / "kept"),
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("preset", ["demo", "diloco", "streaming_diloco"])
def test_chaos_storm_of_all_kinds(tmp_path, preset) -> None:
    """Islands survive a storm of all kinds with equal digests."""
    status, found, said = _storm(
        tmp_path, "--events", "12", "--seed", "1", "--preset", preset, "--gap", "10"
    )
    assert status == 0, said
    assert found["survived"] == found["events"] == 12 and found["digests_equal"]


def test_chaos_leaves_nothing_when_told_to_end(tmp_path) -> None:
    """No process is left when the storm is told to end."""
    command = [
        sys.executable,
        str(SCRIPT),
        "--islands",
        "2",
        "--events",
        "1",
        "--keep",
        str(tmp_path / "kept"),
        "--no-undisturbed",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = tmp_path / "kept" / "storm" / "lab.log"
    end = time.monotonic() + 60
    while (
        not (log.is_file() and log.read_text().count("starts, process") == 2)
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    pids = [int(line.rpartition(" ")[2]) for line in log.read_text().splitlines()]
    process.terminate()
    assert process.wait(60) == 143
    assert len(pids) == 2 and not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_chaos_relay_threads_are_daemons() -> None:
    """Relays leave no thread that keeps the process."""
    links = Links()
    links.close()
    assert all(
        thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()
    )
