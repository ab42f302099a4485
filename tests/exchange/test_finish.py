"""The end of a run: `finish()` takes the plain mean inside a round, whatever the outer step is; the
last line of the log says which islands took part.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import Topology, preset
from fsdp_demo.exchange import summary
from fsdp_demo.exchange.saved_state import History

from ..channels.test_delays_oracle import CASES as DELAYED
from ..channels.test_presets_oracle import CASES, Case, coded, coding, followed, sgd
from ..oracles import presets as oracle
from ..support import layered
from ..support.ends import trained

STEPS = 18  # of a period of 4: two steps after an exchange
LOCO = coded("sparse_loco", period=4, value_dtype="fp32", lr=0.65, **{"applier.dense_lr": 0.8})
ENDS = {
    "diloco": CASES["diloco"],
    "diloco-warmup": CASES["diloco-warmup"],
    "consensus": Case(
        coded("decoupled_momentum", period=4, value_dtype="fp32", lr=0.5),
        oracle.DecoupledMomentum,
        sgd,
        {"period": 4, "lr": 0.5, "dense_lr": 0.5, "coding": coding(transform=False)},
        seed=4,
    ),
    "sparse_loco": Case(
        LOCO, oracle.SparseLoCo, sgd, {"period": 4, "lr": 0.65, "dense_lr": 0.8, "code": "fp32"}
    ),
    "streaming": DELAYED["streaming-5"],
    "streaming-mixed-queue": DELAYED["streaming-8"],
}


def ended(case: Case, steps: int) -> Any:
    def run(me: Any) -> Any:
        def inner(named: Any) -> torch.optim.Optimizer:
            return case.inner([p for _, p in named])

        model, feed = case.model.make(case.seed), case.model.feed(case.seed)
        out = layered.train(
            me,
            model,
            case.config,
            inner,
            feed,
            steps,
            end=lambda e: e.finish(),
            equal=lambda t: False,
        )
        return out["final"], out["final_equal"], out["params"][-1]

    return run


@pytest.mark.parametrize(
    "name, steps", [*((n, STEPS) for n in ENDS), ("diloco", 20), ("sparse_loco", 20)]
)
def test_finish_inside_round_oracle(run_ranks, name, steps):
    """`finish` inside a round comes to the parameters of the oracle."""
    case = ENDS[name]
    method = case.make(case.model.start(case.seed), 2, case.inner, **case.options)
    followed(
        method,
        [[case.model.island_gradient(case.seed, t, r) for r in range(2)] for t in range(steps)],
    )
    method.finish()
    for final, equal, last in run_ranks(ended(case, steps), 2, 1):
        assert equal
        for n, p in method.theta[0].items():
            assert float((final[n] - p.detach()).abs().max()) <= case.tolerance, n
            assert steps % 4 or torch.equal(final[n], last[n])  # the last exchange was just done


@pytest.mark.parametrize("name", ["diloco", "muloco"])
def test_finish_inside_round_validation_loss(run_ranks, name):
    """An end inside a round does no harm to the validation loss. With the published constant
    momentum a whole outer step for one step of work was 1.4 and 1.5 times worse than the anchor
    before.
    """
    config = preset(name, period=10, momentum_warmup=0).changed({"inner_optimizers": ["as_is"]})
    ends = run_ranks(
        lambda me: [(r.anchor, r.after, r.equal, r.before, r.final) for r in trained(config, 121)],
        1,
        1,
    )[0]
    for anchor, after, equal, _, final in ends:
        assert equal and after <= anchor * 1.01
        if name == "diloco":
            for f, *own in zip(final, *(e[3] for e in ends), strict=True):
                assert float((f - sum(own) / len(own)).abs().max()) < 1e-6


def test_finish_inside_round_keeps_momentum(monkeypatch) -> None:
    """`finish` inside a round leaves the momentum of the last whole round. A checkpoint written
    after `finish()` goes on as if the run had been longer.
    """
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = fsdp_demo.attach(
        optimizer, "diloco", model=model, period=2, inner_optimizers="as_is", momentum_warmup=0
    )
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    before = exchange.channels[0].momentum.clone()
    exchange.finish()
    assert before.any() and torch.equal(exchange.channels[0].momentum, before)


@pytest.mark.parametrize(
    ("slots", "equal", "says"),
    [
        ((0, 1, 2), True, "for the link; islands agree, bit for bit"),
        ((0, 2), True, "3 islands began, 2 at the end: islands 0, 2; these agree, bit for bit"),
        ((0, 2), False, "3 islands began, 2 at the end: islands 0, 2; these differ"),
        ((0, 2), None, "2 at the end: islands 0, 2; these hold their mean, this one was off it"),
        ((0,), True, "3 islands began, 1 at the end: island 0: there is no other to agree with"),
    ],
)
def test_finish_log_names_islands(
    slots: tuple[int, ...], equal: bool | None, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The last line of the log names the islands that took part at the end, and whether
    they agree.
    """
    topology = Topology("islands", 0, 3, count=3, name="island0")
    queue = SimpleNamespace(history=History(3, slots=slots))
    runtime: Any = SimpleNamespace(topology=topology, peers=1, queue=queue, step=9, drift=0.25)
    found = {"exchanges": 4, "bytes_sent": 10, "seconds_waiting": 0.0}
    with caplog.at_level(logging.INFO, "fsdp_demo"):
        summary.ended(runtime, found, equal)
    assert says in caplog.text, caplog.text
