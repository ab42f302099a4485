"""Delays on every kind of channel, below and beyond the period, against the oracles: what lands
when, what `flush` and `finish` bring.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp_demo import preset

from ..oracles import presets as oracle
from ..support import probe
from ..support.layered import LAYERED, Given
from .test_presets_oracle import ISLANDS, Case, P, adamw, coded, coding, decoupled, demo, parts, sgd

STEPS = 20
FEW = ("muloco-int4", "sparse_loco-2bit")  # coded: a few elements may be rounded another way


def late(delay: int, mix: float = 0.0) -> dict[str, Any]:
    return {"schedule.delay": delay, "applier.mix": mix}


def outer(delay: int, mix: float = 0.0, keep: bool = False, own: float = 1.0, **kw: Any) -> Case:
    after = {**late(delay, mix), "applier.keep_steps": keep, "applier.own_share": own}
    config = coded("diloco", momentum_warmup=0, period=P, **after)
    options = {"period": P, "lr": 0.7, "delay": delay, "mix": mix, "keep": keep, "own": own}
    return Case(config, oracle.Streaming, adamw, options, **kw)


def averaged(delay: int, mix: float = 0.0) -> Case:
    config = preset("local_sgd", period=P, clip=None, **late(delay, mix))
    return Case(config, oracle.Averaging, sgd, {"period": P, "delay": delay, "mix": mix})


def states(delay: int, of_states: int) -> Case:
    changes = {
        "parameter.schedule.delay": delay, "exp_avg.schedule.delay": of_states,
        "exp_avg_sq.schedule.delay": of_states,
    }  # fmt: skip
    clocks = {"embeddings": True, "period": 3, "states": {"exp_avg": 1, "exp_avg_sq": 2}}
    config = preset("desloc", **clocks, clip=None).changed(changes)
    options = {"period": 3, "states": {"exp_avg": 3, "exp_avg_sq": 6}}
    options |= {"delay": delay, "state_delay": of_states}
    return Case(config, oracle.Averaging, adamw, options)


def sparse(rule: str, delay: int, mix: float = 0.0, **kw: Any) -> Case:
    options = {"rule": rule, "period": P, "delay": delay, "mix": mix}
    options["coding"] = coding(senders=rule == "consensus")
    config = decoupled(rule=rule).changed(late(delay, mix))
    return Case(config, oracle.DecoupledMomentum, sgd, options, **kw)


def gathered(period: int, delay: int, sign: bool = False, **kw: Any) -> Case:
    changes = {"schedule.sync_every": period, "schedule.delay": delay}
    options = {"sign": sign, "beta": 0.9, "period": period, "delay": delay, "coding": coding()}
    return Case(demo(sign=sign, beta=0.9).changed(changes), oracle.Demo, sgd, options, **kw)


def full(delay: int) -> Case:
    return Case(preset("full", **{"schedule.delay": delay}), oracle.Full, adamw, {"delay": delay})


def streaming(delay: int, mix: float, **kw: Any) -> Case:
    given = {"period": 6, "delay": delay, "mix": mix}
    plain = {"momentum_warmup": 0, "layers": 2, "value_dtype": "fp32", "clip": None}
    config = preset("streaming_diloco", **given, **plain)
    options = {**given, "parts": parts(2, "strided")}
    return Case(config, oracle.Streaming, adamw, options, model=LAYERED, **kw)


CASES = {
    "delta-1": outer(1),
    "delta-3-mixed": outer(3, 0.5),
    "delta-4": outer(4),  # sent and landed on the same step
    "delta-6": outer(6),
    "delta-9-mixed": outer(9, 0.25),
    "delta-1-kept": outer(1, keep=True),
    "delta-3-kept": outer(3, keep=True),
    "delta-6-kept": outer(6, keep=True),
    "delta-4-eager": outer(4, own=0.5),
    "delta-6-eager-kept": outer(6, keep=True, own=0.5),
    "consensus-2": sparse("consensus", 2),
    "consensus-4-mixed": sparse("consensus", 4, 0.5),
    "consensus-9": sparse("consensus", 9, seed=1),
    "released-1": sparse("released", 1),
    "released-6": sparse("released", 6),
    "sparse_loco-2bit": Case(coded("sparse_loco", period=2, **{"schedule.delay": 5}),
        oracle.SparseLoCo, sgd, {"period": 2, "delay": 5, "dtype": torch.float32}, seed=3),
    "muloco-int4": Case(coded("muloco", momentum_warmup=0, period=P, value_dtype="int4",
        **{"schedule.delay": 6}), oracle.Streaming, sgd,
        {"period": P, "lr": 0.8, "beta": 0.9, "code": "int4", "delay": 6, "dtype": torch.float32},
        model=LAYERED),
    "streaming-5": streaming(5, 0.5),
    "streaming-8": streaming(8, 0.5),
    "streaming-13": streaming(13, 0.0),
    "parameter-1": averaged(1),
    "parameter-3-mixed": averaged(3, 0.5),
    "parameter-4": averaged(4),
    "parameter-6-mixed": averaged(6, 0.5),
    "parameter-9": averaged(9),
    "state-5": states(0, 5),
    "state-4-parameter-2": states(2, 4),
    "state-7-parameter-7": states(7, 7),
    "gradient-1": full(1),
    "gradient-4": full(4),
    "demo-2": gathered(1, 2),
    "demo-3-sign": gathered(1, 3, sign=True),
    "demo-period-4-delay-1": gathered(4, 1),
    "demo-period-2-delay-5": gathered(2, 5, seed=2),
}  # fmt: skip
ON = {
    "streaming-8": "2x2", "delta-6": "2x2", "delta-3-kept": "2x2", "delta-6-eager-kept": "2x2",
    "consensus-9": "2x2", "demo-period-2-delay-5": "2x2", "state-7-parameter-7": "4x1",
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_delay_follows_oracle(run_ranks, name):
    """Delayed means follow the oracle. Step for step, then after `flush`, which applies what is
    still under way in its order.
    """
    case, (count, procs, _) = CASES[name], ISLANDS[ON.get(name, "2x1")]
    method, truth = case.follow(count, STEPS, procs)
    assert method.margin > 5e-6, f"choose another seed: a choice is as close as {method.margin}"
    waiting = [
        len(getattr(f, kind, []))
        for f in (method, *getattr(method, "fragments", []))
        for kind in ("flying", "states_flying")
    ]
    assert any(waiting), "nothing is left to flush"
    method.flush()
    truth.append([{n: p.detach() for n, p in theta.items()} for theta in method.theta])
    signed = getattr(method, "sign", False)
    results = run_ranks(trained(case, "flush"), count, procs)[::procs]
    for island, (params, final, _) in enumerate(results):
        for t, step in enumerate([*params, final]):
            for n, w in truth[t][island].items():
                difference = (step[n] - w).abs()
                if signed:  # where it hangs on rounding
                    difference *= method.smallest[n] >= 1e-4
                if name in FEW:
                    assert float((difference > 1e-5).float().mean()) < 0.02, (t, n)
                else:
                    assert float(difference.max()) <= case.tolerance, (t, n)


def trained(case: Case, end: str, steps: int = STEPS) -> Any:
    """What each rank runs. The first process of an island hands back the parameters after every
    step, those after `flush` or `finish`, and whether these are equal on all islands.
    """

    def run(me: Any) -> Any:
        out = case.train(me, steps, end=lambda e: getattr(e, end)(), equal=lambda t: False)
        return (out["params"], out["final"], out["final_equal"]) if me.proc == 0 else None

    return run


def test_delay_overlapping_means_make_equal(run_ranks):
    """Delayed means make replicas equal once gradients end. Parameters averaged late, several under
    way at once: what differed is corrected once, not once per flight.
    """

    def until_5(seed: int, t: int, island: int, proc: int) -> dict[str, torch.Tensor]:
        return {n: g * float(t < 5) for n, g in probe.gradient(seed, t, island, proc).items()}

    case = replace(averaged(9), model=Given(probe.Probe, until_5))
    found = run_ranks(trained(case, "flush", 30), 3, 1)
    mean = {n: p.double() for n, p in case.model.start(case.seed).items()}
    for t in range(5):
        for n in mean:
            g = [case.model.island_gradient(case.seed, t, r).get(n) for r in range(3)]
            mean[n] = mean[n] - 0.01 * sum(x.double() for x in g if x is not None) / 3
    for n in mean:
        for _, final, _ in found:
            assert float((final[n] - mean[n]).abs().max()) < 1e-5, n


def test_delay_max_in_flight_refused():
    """A delay that keeps more than `max_in_flight` exchanges in flight is refused."""
    with pytest.raises(ValueError, match="max_in_flight=16"):
        preset("local_sgd", period=2, **{"schedule.delay": 40})
    config = preset("local_sgd", period=2, max_in_flight=21, **{"schedule.delay": 40})
    assert config.channels[0].schedule.in_flight == 21


@pytest.mark.parametrize(
    "delay, mix, steps", [(0, 0.5, 20), (0, 0.5, 18), (1, 0.0, 20), (6, 0.0, 18), (3, 0.5, 20)]
)
def test_delay_finish_parameters_equal(run_ranks, delay, mix, steps):
    """After `finish` the parameters of all replicas are the same bits, near their mean, whatever
    was in flight, mixed or rounded.
    """
    case = averaged(delay, mix)
    method, _ = case.follow(3, steps)
    for _, final, equal in run_ranks(trained(case, "finish", steps), 3, 1):
        assert equal
        for n in method.theta[0]:
            mean = sum(theta[n].detach() for theta in method.theta) / 3
            assert float((final[n] - mean).abs().max()) < 1e-5, n
