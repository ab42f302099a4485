"""The end of a run: `finish()` takes the plain mean inside a round, whatever the outer step is; the
log says which islands took part, and that a script has forgotten `finish()`.
"""

from __future__ import annotations

import atexit
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Topology, preset
from fsdp_demo.exchange import summary
from fsdp_demo.exchange.saved_state import History

from ..channels import test_delays_oracle as delays
from ..channels.test_presets_oracle import CASES, Case, coded, coding, sgd
from ..oracles import presets as oracle
from ..support import threaded
from ..support.ends import trained
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.two_layers import train

STEPS = 18  # of a period of 4: two steps after an exchange
LOCO = coded("sparse_loco", period=4, value_dtype="fp32", lr=0.65, **{"applier.dense_lr": 0.8})
ENDS = {
    "diloco": CASES["diloco"],
    "diloco-warmup": CASES["diloco-warmup"],
    "consensus": Case(coded("decoupled_momentum", period=4, value_dtype="fp32", lr=0.5),
        oracle.DecoupledMomentum, sgd,
        {"period": 4, "lr": 0.5, "dense_lr": 0.5, "coding": coding(transform=False)}, seed=4),
    "sparse_loco": Case(LOCO, oracle.SparseLoCo, sgd,
        {"period": 4, "lr": 0.65, "dense_lr": 0.8, "code": "fp32"}),
    "streaming": delays.CASES["streaming-5"],
    "streaming-mixed-queue": delays.CASES["streaming-8"],
}  # fmt: skip


DRAINED = (
    "delta-3-mixed", "delta-3-kept", "delta-6", "delta-6-eager-kept", "delta-9-mixed",
    "streaming-5", "streaming-13",
)  # fmt: skip
AT = [(n, STEPS) for n in ENDS] + [("diloco", 2), ("diloco", 20), ("sparse_loco", 20)]
AT += [(n, 20) for n in DRAINED] + [("delta-4", 18), ("delta-4", 19)]


@pytest.mark.parametrize("name, steps", AT)
def test_finish_inside_round_oracle(run_ranks, name, steps):
    """`finish` inside a round applies all exchanges in flight and makes one more; it comes to the
    parameters of the oracle.
    """
    case = (delays.CASES | ENDS)[name]
    method, _ = case.follow(2, steps)
    method.finish()
    just_done = steps % 4 == 0 and not case.options.get("delay")
    for params, final, equal in run_ranks(delays.trained(case, "finish", steps), 2, 1):
        assert equal
        for n, p in method.theta[0].items():
            assert float((final[n] - p.detach()).abs().max()) <= case.tolerance, n
            assert not just_done or torch.equal(final[n], params[-1][n])


@pytest.mark.parametrize("name", ["diloco", "muloco"])
@in_ranks(1, 1)
def test_finish_inside_round_validation_loss(name):
    """An end inside a round does no harm to the validation loss. With the published constant
    momentum a whole outer step for one step of work was 1.4 and 1.5 times worse than the anchor
    before.
    """
    ends = trained(coded(name, period=10, momentum_warmup=0, clip=1.0), 121)
    for end in ends:
        assert end.equal and end.after <= end.anchor * 1.01
        if name == "diloco":
            for f, *own in zip(end.final, *(e.before for e in ends), strict=True):
                assert float((f - sum(own) / len(own)).abs().max()) < 1e-6


def test_finish_inside_round_keeps_momentum() -> None:
    """`finish` inside a round leaves the momentum of the last whole round. A checkpoint written
    after `finish()` goes on as if the run had been longer.
    """
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = preset("diloco", period=2, inner_optimizers="as_is", momentum_warmup=0)
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    train(optimizer, lambda t: model(torch.ones(1, 4)).sum(), 3)
    before = exchange.channels[0].momentum.clone()
    exchange.finish()
    assert before.any() and torch.equal(exchange.channels[0].momentum, before)


@pytest.mark.parametrize(("slots", "equal", "says"), [
    ((0, 1, 2), True, "for the link; islands agree, bit for bit"),
    ((0, 2), True, "3 islands began, 2 at the end: islands 0, 2; these agree, bit for bit"),
    ((0, 2), False, "3 islands began, 2 at the end: islands 0, 2; these differ"),
    ((0, 2), None, "2 at the end: islands 0, 2; these hold their mean, this one was off it"),
    ((0,), True, "3 islands began, 1 at the end: island 0; there is no other to agree with"),
])  # fmt: skip
def test_finish_log_names_islands(slots: tuple[int, ...], equal: bool | None, says, caplog) -> None:
    """The last line of the log names the islands that took part at the end, and whether
    they agree.
    """
    topology = Topology("islands", 0, 3, count=3, name="island0")
    queue = SimpleNamespace(history=History(3, slots=slots))
    runtime: Any = SimpleNamespace(topology=topology, peers=1, queue=queue, step=9, drift=0.25)
    found = {"exchanges": 4, "bytes_sent": 10, "seconds_waiting": 0.0}
    with caplog.at_level(logging.INFO, "fsdp_demo"):
        summary.ended(runtime, found, equal, [])
    assert says in caplog.text, caplog.text


TEXT = "the script ends at step 3, and finish() was not called"


def attached(topology: Topology | None = None, steps: int = 0) -> fsdp_demo.Exchange:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology, period=2)
    train(optimizer, lambda t: model(torch.randn(2, 4)).sum(), steps)
    return exchange


def test_finish_forgotten_is_logged(run_ranks: Any) -> None:
    """A script that ends without `finish` leaves a line in the log."""

    def run() -> None:
        logging.basicConfig(level=logging.WARNING, force=True)
        exchange = attached(steps=3)
        atexit._run_exitfuncs()  # a forked rank ends without
        assert exchange.closed

    outs = run_ranks(run, islands=2, procs=1, check=False)
    assert all(o.log.count(TEXT) == 1 for o in outs), outs[0].log


def test_finish_forgotten_silent_otherwise(run_ranks: Any) -> None:
    """Every other way to end leaves no line about a forgotten `finish`."""

    def ends(exchange: fsdp_demo.Exchange, way: str) -> None:
        if way == "finish":
            exchange.finish()
        elif way == "finish-open":
            exchange.finish(close=False)
        elif way == "detach":
            exchange.detach()
        elif way == "stopped":
            exchange._runtime.stopped = True
        elif way == "broken":
            exchange._queue.broken = True

    def run() -> dict[str, int]:
        seen = heard(logging.INFO)
        found = {}
        for way in ("", "finish", "finish-open", "detach", "stopped", "broken", "error", "fresh"):

            def island(number: int, topology: Topology, way: str = way) -> None:
                exchange = attached(topology, 0 if way == "fresh" else 3)
                ends(exchange, way)
                exchange._at_exit()

            if way == "error":  # the interpreter's note of an exception that ended the script
                sys.last_value = RuntimeError("the script's own")
            threaded.values(threaded.islands(island))
            sys.last_value = None  # type: ignore[assignment]
            found[way] = sum("finish() was not called" in text for text in seen)
            seen.clear()
        return found

    (found,) = run_ranks(run, 1, 1)
    assert found.pop("") == 2 and not any(found.values()), found


def test_finish_forgotten_silent_alone(caplog: pytest.LogCaptureFixture) -> None:
    """One replica alone misses no `finish`."""
    exchange = attached(steps=1)
    exchange._at_exit()
    assert exchange.closed and "finish()" not in caplog.text


@in_ranks(2, 1)
def test_finish_keeps_history_and_participants(me: Any) -> None:
    """A checkpoint that is saved behind `finish()` says which islands took part, as one before it
    does: a resume knows by that which of them is behind.
    """
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = preset("local_sgd", period=1, inner_optimizers="as_is")
    exchange = fsdp_demo.attach(optimizer, config, model=model)
    train(optimizer, lambda t: model(torch.ones(1, 3)).sum(), 3)
    before = exchange.history, exchange.applied_by
    exchange.finish()
    after = (exchange.history, exchange.applied_by)
    assert before == after and after[0] and after[1] == [0, 1]
