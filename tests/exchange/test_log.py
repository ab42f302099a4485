"""The lines of the log: what a script without logging sees at attach and at finish, and the words
of single lines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.commands import during_run
from fsdp_demo.errors import counted
from fsdp_demo.exchange import summary
from fsdp_demo.exchange.sending import Exchanging
from fsdp_demo.exchange.summary import odd_ends, total_steps
from fsdp_demo.rendezvous import environment

from ..support import threaded
from ..support.heard import heard
from ..support.two_layers import train

ROOT, LOG = logging.getLogger(), logging.getLogger("fsdp_demo")


@contextmanager
def silence() -> Iterator[None]:
    """No handler anywhere, as in a script of a few lines; pytest puts its own there for every
    test.
    """
    before, level = [list(logger.handlers) for logger in (ROOT, LOG)], LOG.level
    ROOT.handlers.clear()
    LOG.handlers.clear()
    LOG.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        ROOT.handlers[:], LOG.handlers[:] = before
        LOG.setLevel(level)


@pytest.fixture(autouse=True)
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not yet said that it is one replica which nobody has asked for."""
    monkeypatch.setattr(environment, "_said", set())


def snippet(topology: fsdp_demo.Topology | None = None, steps: int = 20) -> fsdp_demo.Exchange:
    """The README's first lines."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=10, topology=topology)
    train(optimizer, lambda t: model(torch.randn(4, 8)).square().mean(), steps)
    exchange.finish()
    return exchange


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What stands on stderr."""
    return list(capfd.readouterr().err.splitlines())


def test_log_script_without_logging(capfd, monkeypatch) -> None:
    """A script without logging sees on stderr what runs and how it ended."""
    # on a busy machine the exchange thread of one replica is waited for, too
    monkeypatch.setattr(Exchanging, "waited", lambda *_: 0.0)
    with silence():
        exchange = snippet()
        first, *lines = said(capfd)
        assert first.startswith("[island0] WARNING: one replica: ISLAND_COUNT is not set")
        assert lines[0] == "[island0] preset diloco, one replica, nothing is sent, from step 0"
        assert lines[1] == "    delta every 10 (fp32, mean over replicas)"
        assert all(len(line) < 120 for line in lines)
        ended = (
            "finished at step 20: 2 exchanges, 0 B sent, 0.0 s waiting for the link; one replica"
        )
        assert lines[-1] == f"[island0] {ended}"
        shown = "'diloco', one replica, step 20, 0 B sent by this rank, finished"
        assert repr(exchange) == f"<Exchange {shown}>"
        snippet()  # the handler and the warning come once per process
        assert len(LOG.handlers) == 1 and said(capfd) == lines


def test_log_script_with_logging(capfd) -> None:
    """The library adds no handler where the script has set up logging, and drops its own when that
    happens later.
    """
    with silence():
        LOG.addHandler(logging.NullHandler())
        snippet()
        LOG.handlers.clear()
        ROOT.addHandler(logging.NullHandler())
        snippet()
        assert not said(capfd) and LOG.level == logging.NOTSET and not LOG.handlers
        ROOT.handlers.clear()
        snippet(steps=0)
        assert said(capfd) and LOG.level == logging.INFO
        ROOT.addHandler(logging.NullHandler())  # after attach: the voice gives way
        snippet(steps=0)
        assert not said(capfd) and LOG.level == logging.NOTSET and not LOG.handlers


def test_log_first_record_of_later_handler(capfd) -> None:
    """A handler that a script adds later gets the record at which the voice gives way, too."""
    with silence():
        summary.speak(fsdp_demo.Topology("single", name="west"))
        lines = heard(logging.WARNING)
        LOG.warning("west: of all")
        assert lines == ["west: of all"] and not said(capfd)


def test_log_level_kept_other_ranks_warn(capfd) -> None:
    """A log level that the user set stays, and ranks other than 0 only warn."""
    with silence():
        LOG.setLevel(logging.ERROR)
        snippet()
        assert not said(capfd) and LOG.level == logging.ERROR
        summary.hush()
        assert LOG.level == logging.ERROR
        LOG.setLevel(logging.NOTSET)
        summary.speak(fsdp_demo.Topology("single", name="west", rank=1, world=2))
        LOG.info("west: of rank 0 only")
        LOG.warning("west: of all")
        assert said(capfd) == ["[west] WARNING: of all"]


def test_log_finish_bytes_and_agreement(caplog) -> None:
    """The last lines say what the islands sent and that they agree."""

    def work(island: int, topology: fsdp_demo.Topology) -> tuple[str, int]:
        exchange = snippet(topology)
        return repr(exchange), exchange.metrics()["bytes_sent"]

    with caplog.at_level(logging.INFO, "fsdp_demo"):
        shown = threaded.values(threaded.islands(work))
    sent = shown[0][1]
    assert sent > 2 * 4 * 72  # twice all parameters
    for i, (text, _) in enumerate(shown):
        found = f"'diloco', island {i} of 2, step 20, {sent} B sent by this rank, finished"
        assert text == f"<Exchange {found}>"
    ends = [m for m in caplog.messages if "finished" in m]
    assert len(ends) == 2 and all(
        f"2 exchanges, {sent} B sent" in m and "islands agree, bit for bit" in m for m in ends
    )
    assert sum("island 1 of 2, from step 0" in m for m in caplog.messages) == 1


# -- steps that end inside a round ---------------------------------------------------------------


@pytest.mark.parametrize(("config", "steps", "said"), [
    (preset("diloco", period=10), 121, ["121 steps", "period 10", "120 or 130"]),
    (preset("diloco", period=10), 7, ["a round: 10"]),
    (preset("diloco", period=10, **{"schedule.offset": 3}), 120, ["113 or 123"]),
    (preset("sparse_loco"), 100, ["90 or 120"]),
    (preset("diloco", period=10), 120, []),
    (preset("diloco", period=10, **{"schedule.offset": 3}), 123, []),
    (preset("local_sgd", period=10), 121, []),  # a mean is a mean
    # ends by a mean of its own
    (preset("decoupled_momentum", rule="released", period=10), 121, []),
    (preset("streaming_diloco", period=10), 121, []),
    (preset("demo"), 121, []),
])  # fmt: skip
def test_log_end_inside_round(config, steps, said) -> None:
    """A line at attach says that the number of steps ends inside a round."""
    found = odd_ends(config, steps)
    assert len(found) == bool(said) and all(part in found[0] for part in said)


def test_log_end_inside_round_at_attach(caplog) -> None:
    """The warning of an end inside a round comes at attach where the steps are known."""
    cases = (({"steps": 121}, 1), ({"max_steps": 121}, 1), ({"steps": 120}, 0), ({"lr": 121}, 0))
    for agree, warned in (*cases, (None, 0)):
        caplog.clear()
        attached("diloco", period=10, must_match=agree)[0].detach()
        assert sum("inside a round" in m for m in caplog.messages) == warned
    unknown = ({"must_match.steps": True}, {"must_match.max_steps": -1}, {})
    assert [total_steps(facts) for facts in unknown] == [None] * 3


def attached(preset: str, **changes: Any) -> Any:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return fsdp_demo.attach(optimizer, preset, model=model, batch=(4, 8), **changes), optimizer


def test_log_singular_and_plural(caplog: pytest.LogCaptureFixture) -> None:
    """The log uses the singular for one of a thing."""
    caplog.set_level(logging.INFO, "fsdp_demo")
    late = {"schedule.delay": 1, "applier.mix": 0.5}
    exchange, optimizer = attached("diloco", period=2, **late)
    for _ in range(3):
        optimizer.step()
    exchange.finish()
    assert "applied 1 step later" in caplog.text
    assert "4 x 8 accumulation x 1 rank x 1 island; 1 shard x 1 copy" in caplog.text
    for text in ("1 steps", "1 ranks", "1 islands", "1 exchanges", "1 shards", "1 copies"):
        assert f" {text}" not in caplog.text
    assert counted(1, "step") == "1 step" and counted(0, "copy", "copies") == "0 copies"


def test_log_outer_rate_like_inner(caplog: pytest.LogCaptureFixture) -> None:
    """The log warns of an outer rate that looks like an inner one."""
    attached("diloco", lr=1e-3)
    (said,) = [r.getMessage() for r in caplog.records if "outer rate" in r.getMessage()]
    assert "channel 'delta': the outer rate (applier.lr) is 0.001" in said
    assert "that of your optimizer (recipes: --lr), not lr of preset diloco" in said
    caplog.clear()
    for changes in ({}, {"lr": 0.05}):
        attached("diloco", **changes)
    attached("local_sgd")
    assert "outer rate" not in caplog.text


def test_log_drift_counts_steps_from_one(caplog: pytest.LogCaptureFixture) -> None:
    """The line on the drift before an average names the step that the user has counted."""
    caplog.set_level(logging.INFO, "fsdp_demo")
    feedback = {"rule": "released", "inner_optimizers": "as_is", "clip": None}
    exchange, optimizer = attached("decoupled_momentum", period=2, average_every=2, **feedback)
    for _ in range(9):
        optimizer.step()
    exchange.detach()
    drifts = [r.getMessage() for r in caplog.records if "before the average" in r.getMessage()]
    assert drifts == [f"island0: drift 0 before the average of step {n}" for n in (4, 8)]


def test_log_values_sent_whole(caplog: pytest.LogCaptureFixture) -> None:
    """The log says how many values of sparse channels go whole."""
    caplog.set_level(logging.INFO, "fsdp_demo")
    model = torch.nn.Linear(64, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp_demo.attach(optimizer, "demo", model=model).detach()
    assert "100 of 6500 values of sparse channels go whole" in caplog.text
    caplog.clear()
    attached("diloco")
    assert "go whole" not in caplog.text


def test_log_run_status_counts_islands() -> None:
    """The status of a run counts the islands beside the epoch."""
    member = {"slot": 0, "life": 0, "delivered": 1, "heard": {}}
    found = {"run": "a", "attempt": "0", "state": "members", "epoch": 0, "members": [member]}
    head, line = during_run.status_text(found).splitlines()
    assert head == "run a, attempt 0: members; epoch 0, 1 island"
    assert line == "  island 0: 1 message delivered, heard nobody"
    other = member | {"slot": 1, "delivered": 2}
    two = during_run.status_text(found | {"members": [member, other]})
    assert "epoch 0, 2 islands" in two and "island 1: 2 messages delivered" in two


def test_log_run_status_of_a_finished_run() -> None:
    """The islands of a finished run have ended, and those that were stopped can be started again;
    in a run under way their listener is silent.
    """
    members = [{"slot": 0, "life": 0, "silent": True}]
    found = {"run": "a", "attempt": "0", "state": "finished", "epoch": 1, "members": members}
    assert "island 0: has ended with the run" in during_run.status_text(found)
    assert "does not answer" in during_run.status_text(found | {"state": "members"})
    stopped = during_run.status_text(found | {"state": "left"})
    assert "island 0: has ended before the end of the run, and can be started again" in stopped
