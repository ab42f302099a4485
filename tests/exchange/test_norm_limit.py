"""A contribution whose norm is far from the others': nobody takes anything of it, its island hears
of it and drops what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from fsdp_demo import ExchangeConfig, NotFinite, PeerLost, Topology, preset
from fsdp_demo.exchange.watch import LEAST, LIMIT, MESSAGES, Kept, Norms
from fsdp_demo.peers.header import FAR, HEADER, NOT_FINITE, Header, norm_code, norm_of

from ..support import probe
from ..support.heard import heard
from ..support.inside import in_ranks, in_threads
from ..support.sealed import seal, unseal
from ..support.small import Noise, finite
from ..support.threaded import islands, values
from ..support.two_layers import sgd

PLAIN = {"clip": None, "inner_optimizers": "as_is"}
CONFIGS = {
    "full": preset("full", **PLAIN),
    "demo": preset("demo", **PLAIN),
    "demo late": preset("demo", **PLAIN, **{"schedule.delay": 2}),
    "random": preset("random", clip=None, **{"codec.topk": 512}),
    "diloco": preset("diloco", period=1, **PLAIN),
    "diloco-int8": preset("diloco", period=1, value_dtype="int8", **PLAIN),
    "diloco queue": preset("diloco", period=1, **PLAIN, **{"schedule.delay": 2}),
    "streaming_diloco": preset("streaming_diloco", period=2, delay=1, layers=1, **PLAIN),
    "decoupled_momentum": preset("decoupled_momentum", period=1, **PLAIN),
    "released": preset("decoupled_momentum", period=1, rule="released", **PLAIN),
    "sparse_loco": preset("sparse_loco", period=1, **PLAIN),
    "sign_loco": preset("sign_loco", period=1, momentum_warmup=0, **PLAIN),
    "local_sgd": preset("local_sgd", period=1, **PLAIN),
    "local_sgd late": preset("local_sgd", period=2, **PLAIN, **{"schedule.delay": 1}),
}
ROUNDS = ("diloco queue", "local_sgd late", "local_sgd")
"""Where parameters were huge for a while and later ones are counted from them, which rounds; or
where only the others' share is taken.
"""

STEPS, BAD = 18, 12


def judge(exchange, found, told: dict[int, list[int]] | None = None) -> None:
    """Note which islands are left out of which message (its number); `told`: leave these out
    instead, whatever their norm.
    """
    norms, plain, seen = exchange._queue.norms, exchange._queue.norms.judged, dict[int, int]()

    def judged(members: Any, headers: list[Header]) -> list[Header]:
        n = seen.setdefault(headers[0].number, len(seen))
        if told is None:
            return plain(members, headers)
        return [
            Header(**{**vars(h), "flags": h.flags | FAR * (j in told.get(n, []))})
            for j, h in enumerate(headers)
        ]

    def note(members: Any, step: int, headers: list[Header]) -> None:
        found.append((seen[headers[0].number], [j for j, h in enumerate(headers) if h.flags & FAR]))

    norms.judged, keeps = judged, norms.note
    norms.note = lambda *args: (note(*args), keeps(*args))


def trained(config, count, bad, told: dict[int, list[int]] | None = None) -> list[Any]:
    """Of each island its parameters after every step, what was left out, its accumulators, and
    whether all ended equal. `bad`: whose gradients are a million times too large at step BAD;
    -1: nobody's."""

    def island(i: int, topology: Topology) -> Any:
        made, found, history = Noise(topology, config), [], []
        judge(made.exchange, found, told)
        for t in range(STEPS):
            made.step(scale=1e6 if i == bad and t == BAD else 1.0)
            history.append(made.tensors())
        metrics = made.exchange.metrics()
        kept = [c.accumulator.clone() for c in made.exchange.channels if c.accumulator is not None]
        made.exchange.finish()
        return history, found, kept, metrics["far"], made.exchange.digests_equal(), made.tensors()

    return values(islands(island, count))


FEWER = ("demo", "diloco", "streaming_diloco")  # elsewhere three islands are enough


@pytest.mark.parametrize(("name", "count"), [*((n, 3) for n in CONFIGS), *((n, 2) for n in FEWER)])
@in_ranks(1, 1)
def test_norm_limit_leaves_out_contribution(name: str, count: int) -> None:
    """The islands train as without a contribution whose norm is far from the others'."""
    poisoned = trained(CONFIGS[name], count, count - 1)
    verdicts = poisoned[0][1]
    assert all(found == verdicts for _, found, *_ in poisoned)
    told = {n: who for n, who in verdicts if who}
    assert told and all(who == [count - 1] for who in told.values()) and len(told) <= 6, told
    assert all(far == len(told) for _, _, _, far, _, _ in poisoned)
    reference = trained(CONFIGS[name], count, -1, told)
    for i, (one, two) in enumerate(zip(poisoned, reference, strict=True)):
        assert one[4] is not False and all(float(t.abs().max()) < 20 for t in (*one[2], *one[5]))
        for a, b in (
            zip(one[0], two[0], strict=True) if i < count - 1 and name not in ROUNDS else ()
        ):
            assert all(map(torch.equal, a, b))
        if name not in ROUNDS:
            assert all(map(torch.equal, one[0][-1], two[0][-1]))
            assert all(map(torch.equal, one[2], two[2]))


@pytest.mark.parametrize("step", [1, BAD])
@pytest.mark.parametrize("name", ["demo", "decoupled_momentum", "sparse_loco"])
@in_threads()
def test_norm_limit_nan_in_accumulator(island: int, topology: Topology, name: str, step: int):
    """A NaN in an accumulator stays on its island. No gradient and no parameter shows it: the norm
    of what is sent does.
    """
    made = Noise(topology, CONFIGS[name])
    for t in range(STEPS):
        if island == 1 and t == step:
            made.exchange.channels[0].accumulator[7] = torch.nan
        made.step()
    kept = [c.accumulator.clone() for c in made.exchange.channels]
    assert made.exchange.metrics()["far"] == 1
    made.exchange.finish()
    assert finite([*kept, *made.tensors()])
    assert made.exchange.digests_equal() is not False


@pytest.mark.parametrize("name", CONFIGS)
@in_ranks(1, 1)
def test_norm_limit_healthy_run_unchanged(name: str) -> None:
    """In a healthy run the norm limit leaves nothing out and changes no bit."""
    plain = trained(CONFIGS[name], 2, -1)
    without = trained(CONFIGS[name].changed({"norm_limit": None}), 2, -1)
    for one, two in zip(plain, without, strict=True):
        assert one[3] == two[3] == 0 and all(map(torch.equal, one[5], two[5]))


@in_threads(3)
def test_norm_limit_common_change_accepted(topology: Topology) -> None:
    """Norms of all islands may change together. Gradients of all islands that grow a million times
    at once are what the run is now.
    """
    made = Noise(topology, CONFIGS["full"])
    for t in range(STEPS):
        made.step(scale=1e6 if t >= BAD else 1.0)
    made.exchange.detach()
    assert made.exchange.metrics()["far"] == 0


@pytest.mark.parametrize("name", ["demo", "diloco"])
@in_ranks(1, 1)
def test_norm_limit_repeated_stops_island(name: str) -> None:
    """An island whose norm stays far from the others' stops with NotFinite."""

    def island(i: int, topology: Topology) -> Any:
        made, steps = Noise(topology, CONFIGS[name]), 0
        try:
            for t in range(3 * LIMIT):
                made.step(scale=1e6 if i == 1 and t >= 2 * LEAST else 1.0)
                steps += 1
        except RuntimeError as error:
            made.exchange.detach()
            return type(error), str(error), steps
        return None, "", steps

    (other, _, _), (bad, text, steps) = values(islands(island, timeout=5))
    assert other is PeerLost and bad is NotFinite and "far from the others'" in text
    assert steps == 2 * LEAST + LIMIT - 1


@pytest.mark.parametrize("name", ["demo", "diloco", "local_sgd"])
def test_norm_limit_whole_island_left_out(run_ranks: Callable[..., Any], name: str) -> None:
    """2 x 2 FSDP2 ranks; the norm is that of the whole island: one shard that is far leaves out
    both lines.
    """

    def run(me: Any) -> Any:
        job = probe.Job(me, CONFIGS[name], sgd)
        for t in range(BAD + 3):
            job.backward(t)
            if me.island == 1 and me.proc == 1 and t == BAD:
                job.model.layer.weight.grad.detach().to_local().mul_(1e6)
            job.end_step()
        headers = job.exchange._queue.norms.state()
        job.exchange.finish()
        assert job.exchange.metrics()["far"] == 1 and job.exchange.digests_equal()
        assert all(float(p.abs().max()) < 50 for p in probe.parts(job.model).values() if p.numel())
        return headers

    outs = run_ranks(run, 2, 2)
    assert all(out == outs[0] for out in outs)


@in_ranks(1, 1)
def test_norm_limit_memory_saved() -> None:
    """The remembered norms are saved and taken over. One island resumes, the other starts anew
    beside it: both leave out the same.
    """

    def before(i: int, topology: Topology) -> Any:
        made = Noise(topology, CONFIGS["diloco queue"])
        for _ in range(BAD):
            made.step()
        state = made.exchange.state_dict()
        made.exchange.detach()
        return made.tensors(), state

    saved = values(islands(before))
    assert saved[0][1]["norms"] == saved[1][1]["norms"] and saved[0][1]["norms"]

    def after(i: int, topology: Topology) -> Any:
        tensors, state = saved[0]
        own = (tensors, None if i else state)
        made = Noise(topology, CONFIGS["diloco queue"], saved=own)
        first = made.exchange._queue.norms.state()
        for t in range(3):
            made.step(scale=1e6 if i == 1 and t == 0 else 1.0)
        made.exchange.flush()
        far = made.exchange.metrics()["far"]
        made.exchange.detach()
        return first, far

    one, two = values(islands(after))
    assert one == two and one[0] == saved[0][1]["norms"] and one[1] > 0


# ---- the rule, and its byte --------------------------------------------------------------------


def headers(*norms: float, flags: int = 0) -> list[Header]:
    return [Header(0, 0, norm=norm_code(n), flags=flags) for n in norms]


def far(judged: list[Header]) -> list[int]:
    return [j for j, h in enumerate(judged) if h.flags & FAR]


def known(limit: float | None = 100.0, count: int = LEAST) -> Norms:
    norms = Norms(limit)
    for step in range(count):
        norms.note(["a"], step, headers(1.0, 2.0, 1.5))
    return norms


@pytest.mark.parametrize(("norms", "expected"), [
    ((1.0, 1.0, 1e6), [2]),
    ((1.0, 1e6), [1]),
    ((1e6, 1.0, 1e3), [0]),  # the middle one is what is usual now
    ((1e6, 1e6), []),
    ((1e6,), []),  # nobody to compare with
    ((0.0, 1e6), []),  # who has nothing to say is nobody
    ((1.0, 300.0), [1]),
    ((1.0, 70.0), []),
    ((1e-6, 1.0, 1.0), []),  # too small is no harm
    ((1e-6, 1.0), []),  # nor does it make the others large
    ((1.0, float("inf")), [1]),
])  # fmt: skip
def test_norm_limit_rule(norms: tuple[float, ...], expected: list[int]) -> None:
    """The rule names the replicas whose norm is far from the usual one."""
    assert far(known().judged(["a"], headers(*norms))) == expected
    assert far(known(None).judged(["a"], headers(*norms))) == []
    beyond = [j for j in expected if norms[j] == float("inf")]  # from the first message on
    assert far(known(count=LEAST - 1).judged(["a"], headers(*norms))) == beyond
    assert far(known().judged(["b"], headers(*norms))) == beyond, "of other channels"


def test_norm_limit_left_out_not_remembered() -> None:
    """A norm that was left out is not remembered, and the memory has a bound."""
    norms = known()
    norms.note(["a"], 9, norms.judged(["a"], headers(3.0, 1e6)))
    norms.note(["a"], 10, headers(1e3, flags=NOT_FINITE))
    assert norms.state()["a"][-1] == [9, [norm_code(3.0)]]
    norms.note(["a"], 9, headers(4.0))  # a resumed run sends it once more
    assert norms.state()["a"][-1] == [9, [norm_code(4.0)]] and len(norms.state()["a"]) == LEAST + 1
    for step in range(100):
        norms.note(["a"], 100 + step, headers(1.0))
    assert len(norms.state()["a"]) == MESSAGES + 1
    assert norms.state([(["a"], 199)])["a"][-1][0] == 198


def test_norm_code_of_one_byte() -> None:
    """The header holds a norm in one byte, to about a tenth."""
    for k in range(-32, 32):
        for f in (1.0, 1.1, 1.3, 1.7):
            norm = f * 2.0**k
            assert 0.9 < norm_of(norm_code(norm)) / norm < 1.11 or not 4e-10 < norm < 3e9
            assert norm_code(norm_of(norm_code(norm))) == norm_code(norm)
    values = (0.0, -1.0, float("nan"), float("inf"), 1e-30, 1e30)
    assert [norm_code(v) for v in values] == [0, 0, 255, 255, 1, 255]
    assert norm_of(0) == 0.0
    body = torch.arange(5, dtype=torch.uint8)
    plain, with_norm = (seal(Header(7, 3, flags=NOT_FINITE, norm=n), body) for n in (0, 200))
    assert len(with_norm) == HEADER.size + 5 == 61
    assert (plain != with_norm).nonzero().flatten().tolist()[0] == 7
    header, _ = unseal(with_norm, Header(7, 3), "island 1")
    assert (header.flags, header.norm) == (NOT_FINITE, 200)
    header, _ = unseal(seal(Header(7, 3, flags=FAR), body), Header(7, 3), "island 1")
    assert header.flags == 0, "nobody says of itself, or of others, that it is far"


@pytest.mark.parametrize("kept", [[1, [0]], [1, []], [1, [256]], ["x", [1]]])
def test_norm_limit_state_form_refused(kept: Any) -> None:
    """Remembered norms of another form are refused."""
    with pytest.raises(ValueError):
        msgspec.convert({"a": [kept]}, Kept)
    assert msgspec.convert({"a": [[1, [2, 3]]]}, Kept) == {"a": [(1, [2, 3])]}


def test_norm_limit_setting() -> None:
    """`norm_limit` is 100 by default, is part of the digest and must exceed 1."""
    config = preset("diloco")
    assert config.norm_limit == 100.0 and ExchangeConfig.from_yaml(config.to_yaml()) == config
    older = {k: v for k, v in config.to_dict().items() if k != "norm_limit"}
    assert config.digest() == ExchangeConfig.from_dict(older).digest()
    others = [preset("diloco", norm_limit=v).digest() for v in (None, 50.0)]
    assert len({config.digest(), *others}) == 3
    for wrong in (1.0, 0.0, -3.0, float("nan")):
        with pytest.raises(ValueError, match="norm_limit"):
            preset("diloco", norm_limit=wrong)


@in_ranks(1, 1)
def test_norm_limit_log_names_island() -> None:
    """The log of every island names the island that was left out."""
    lines = heard()
    trained(CONFIGS["demo"], 2, 1)
    said = [line for line in lines if "left out" in line]
    assert said[0].startswith(f"step {BAD + 1}: norm far from the others' (at most"), said
    assert "on island 1" in said[0]
    assert said == [said[0]] * 2, "one rank of each island says so"
