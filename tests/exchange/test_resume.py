"""A run goes on from a saved state: bit for bit, beside fresh islands, from the furthest island; a
foreign state is refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import PeerLost, preset

from ..support import threaded
from ..support.inside import in_ranks, in_threads
from ..support.small import RESUMED, Small, same
from ..support.threaded import values
from .test_guard import DEMO, DILOCO


def through_a_file(saved: Any, path: Path) -> Any:
    torch.save(saved, path)
    assert path.stat().st_size < 500_000, "a few tensors of 5000 elements"
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("name", RESUMED)
@in_ranks(1, 1)
def test_resume_through_file_bit_for_bit(me: Any, tmp_path, name) -> None:
    """A state that is saved in the middle of a period, through a file, is restored bit for bit:
    what follows is the run that was never interrupted.
    """
    config = RESUMED[name]

    def whole(i: int, topology: Any) -> Any:
        small = Small(topology, config)
        small.train(5)
        saved = small.save()
        small.train(11)
        end = small.save()
        small.exchange.finish()
        return saved, end, [p.detach() for p in small.params]

    results = values(threaded.islands(whole))

    def resumed(i: int, topology: Any) -> None:
        saved, end, finished = results[i]
        small = Small(topology, config, seed=3, saved=through_a_file(saved, tmp_path / f"{i}.pt"))
        assert small.exchange.step == 5 and same(small.save(), saved)
        small.train(11)
        assert same(small.save(), end)
        small.exchange.finish()
        assert same([p.detach() for p in small.params], finished)

    values(threaded.islands(resumed))


def lost(config: Any, steps: int, until: int) -> list[Any]:
    """Three islands train `steps` steps, and two of them go on up to `until`, as far as they come:
    what these have saved.
    """

    def island(i: int, topology: Any) -> Any:
        small = Small(topology, config)
        small.train(steps)
        if i == 2:
            return small.exchange.detach()
        with pytest.raises(PeerLost):
            small.train(until)
        saved = small.save()
        small.exchange.detach()
        return saved

    return values(threaded.islands(island, 3, timeout=4))


@pytest.mark.parametrize("name", RESUMED)
@in_ranks(1, 1)
def test_resume_beside_fresh_island(me: Any, name) -> None:
    """Survivors go on with a fresh island. Of three islands one dies; two resume from what they
    saved, the third starts anew: right step, equal parameters. A step that the loss cut off is
    taken again, and its tokens are counted once.
    """
    config = RESUMED[name]
    saved = lost(config, 6, 20)
    assert same(saved[0][2]["step"], saved[1][2]["step"])

    def second(i: int, topology: Any) -> Any:
        small = Small(topology, config, seed=i, saved=saved[i])
        start, equal = small.exchange.step, []
        for t in range(start, start + 8):
            small.train(t + 1)
            equal.append(small.exchange.digests_equal())
        small.exchange.finish()
        assert small.exchange.totals()["global_tokens"] == 30 * small.exchange.step
        assert small.exchange.tokens == 10 * (small.exchange.step - (start if i == 2 else 0))
        return start, equal, [p.detach() for p in small.params]

    results = values(threaded.islands(second, 3))
    for start, equal, params in results:
        assert start == saved[0][2]["step"] and same(params, results[0][2])
        assert any(equal) == config.equal_after_exchange
        if config.channels[0].before_step:
            assert all(equal)


@in_ranks(1, 1)
def test_resume_finish_repeats_failed_exchange(me: Any) -> None:
    """A resume after a loss in the last exchange repeats that exchange in `finish`. What was sent
    in an exchange that failed does not count as exchanged: after a resume `finish()` alone leaves
    replicas equal.
    """
    saved = lost(RESUMED["diloco"], 7, 8)

    def second(i: int, topology: Any) -> Any:
        small = Small(topology, RESUMED["diloco"], seed=i, saved=saved[i])
        assert small.exchange.step == 8
        small.exchange.finish()
        return small.exchange.digests_equal(), [p.detach() for p in small.params]

    results = values(threaded.islands(second, 3))
    assert all(equal and same(params, results[0][1]) for equal, params in results)
    assert not same(saved[0][0], saved[1][0])


@pytest.mark.parametrize("period", [500, 12])
@pytest.mark.parametrize("name", ["local_sgd", "desloc", "diloco", "muloco"])
def test_resume_unlike_steps_to_the_end(name: str, period: int) -> None:
    """An island that was cut off in its last exchange, in the step that ends a period or in
    `finish`, goes on with one that stopped many steps before: to the bits of a run that was never
    interrupted.
    """
    config = preset(name, period=period, inner_optimizers="as_is")

    def first(i: int, topology: Any) -> Any:
        small = Small(topology, config)
        small.train(4)
        if i:
            with pytest.raises(PeerLost):
                small.train(12)
                small.exchange.finish()
        saved = small.save()
        small.exchange.detach()
        return saved

    saved = values(threaded.islands(first, timeout=4))
    assert [one[2]["step"] for one in saved] == [4, 12]

    def second(i: int, topology: Any, saved: Any = saved) -> Any:
        small = Small(topology, config, saved=saved[i])
        small.train(12)
        small.exchange.finish(close=False)
        assert small.exchange.digests_equal()
        small.exchange.finish()
        return [p.detach() for p in small.params]

    ends = values(threaded.islands(second))
    whole = values(threaded.islands(lambda i, topology: second(i, topology, (None, None))))
    assert same(ends, whole)


@in_ranks(1, 1)
def test_resume_takes_over_from_furthest(me: Any) -> None:
    """An island that saved earlier takes over the state of the one that is furthest."""
    for name, config in RESUMED.items():

        def first(i: int, topology: Any, config: Any = config) -> Any:
            small = Small(topology, config)
            small.train(3)
            early = small.save()
            small.train(7)
            return small.save() if i else early

        saved = values(threaded.islands(first))

        def second(i: int, topology: Any, config: Any = config, saved: Any = saved) -> Any:
            small = Small(topology, config, saved=saved[i])
            assert small.exchange.step == 7
            small.train(12)
            small.exchange.finish()
            return [p.detach() for p in small.params]

        a, b = values(threaded.islands(second))
        assert same(a, b), name


@in_ranks(1, 1, env={"ISLAND_COUNT": ""})
def test_resume_foreign_state_refused(me: Any) -> None:
    """A state of another model, preset or topology is refused."""
    p = torch.nn.Parameter(torch.randn(70, 66))
    optimizer = torch.optim.SGD([p], lr=0.1)
    states = {}
    for name, config in {"demo": DEMO, "diloco": DILOCO}.items():
        exchange = fsdp_demo.attach(optimizer, config)
        states[name] = copy.deepcopy(exchange.state_dict())
        exchange.detach()
    sparse = preset("decoupled_momentum", transform=True, inner_optimizers="as_is")
    smaller = torch.optim.SGD([torch.nn.Parameter(torch.randn(64, 64))], lr=0.1)
    for inner, config, of, said in (
        (optimizer, DILOCO, "demo", "saved channels"),
        (optimizer, sparse, "diloco", "keeps"),
        (smaller, DILOCO, "diloco", "elements, here it has"),
    ):
        with pytest.raises(ValueError, match=said):
            fsdp_demo.attach(inner, config, state=states[of])


@pytest.mark.parametrize("holder", [0, 1])
@in_threads()
def test_take_over_donor_has_a_state(island, topology, holder):
    """Of islands at equal steps the one with a state is the donor: one resumes from a state of step
    0, whose weights are its own.
    """
    models = [torch.nn.Linear(4, 4) for _ in range(2)]
    for i, model in enumerate(models):
        g = torch.Generator().manual_seed(i)
        model.weight.data.copy_(torch.randn(4, 4, generator=g))
    model, of_holder = models[island], models[holder].weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    alone = fsdp_demo.attach(optimizer, "diloco", model=model, topology=fsdp_demo.Topology())
    state = alone.state_dict() if island == holder else None
    alone.detach()
    fsdp_demo.attach(optimizer, "diloco", model=model, topology=topology, state=state).detach()
    assert torch.equal(model.weight, of_holder)
