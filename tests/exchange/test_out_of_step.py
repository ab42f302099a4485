"""Islands that do not do the same: an error on both sides, at once, that says what each of them
does; and never status 75.
"""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import ExchangeConfig, Mismatch, PeerLost, Topology, WireError, preset
from fsdp_demo.elastic import agreement
from fsdp_demo.exchange import watch
from fsdp_demo.peers import header

from ..elastic.test_peer_group import on_lines
from ..support import threaded
from ..support.threaded import Tap, values
from .test_failure import Small

CONFIGS = {
    "demo": preset("demo"),
    "demo, late": preset("demo", **{"schedule.delay": 2}),
    "full": preset("full"),
    "random": preset("random", inner_optimizer="adamw"),
    "diloco": preset("diloco", period=2, inner_optimizers="as_is"),
    "consensus": preset("decoupled_momentum", period=2, inner_optimizers="as_is"),
    "released": preset("decoupled_momentum", rule="released", period=2, inner_optimizers="as_is"),
    "streaming_diloco": preset(
        "streaming_diloco", period=2, delay=1, layers=0, inner_optimizers="as_is"
    ),
    "local_sgd": preset("local_sgd", period=2),
    "desloc": preset("desloc", period=2),
}


def both(config: ExchangeConfig, acts: Callable[[int, Small], Any]) -> list[str]:
    """What the two islands' errors say when `acts` has led them apart."""

    def island(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        try:
            acts(i, small)
        except RuntimeError as error:
            assert type(error) is Mismatch, error
            return str(error)
        finally:
            small.exchange.detach()
        raise AssertionError("not noticed")

    return values(threaded.islands(island, timeout=20))  # nobody waits so long: the test would


@pytest.mark.parametrize("name", CONFIGS)
def test_out_of_step_early_finish(run_ranks: Callable[..., Any], name: str) -> None:
    """An island that finishes earlier than the other causes an error on both sides. Four steps
    here, six there: the likeliest mistake of a loop over unequal data.
    """

    def acts(i: int, small: Small) -> None:
        small.train(6 if i else 4)
        small.exchange.finish()

    def run() -> Any:
        ended, goes_on = both(CONFIGS[name], acts)
        now = 5 if CONFIGS[name].channels[0].before_step else 6
        assert f"island 1 (island1) is at step {now}, we finished at step 4" in ended, ended
        assert f"island 0 (island0) finished at step 4, we are at step {now}" in goes_on, goes_on
        for text in (ended, goes_on):
            assert "same number of steps" in text and "skip()" in text
            assert "request_stop(together=True)" in text
        return True

    assert run_ranks(run, 1, 1) == [True]


@pytest.mark.parametrize("name", ["local_sgd", "released"])
def test_out_of_step_lone_evaluation(run_ranks: Callable[..., Any], name: str) -> None:
    """An evaluation of one island alone causes an error on both sides."""

    def acts(i: int, small: Small) -> None:
        small.train(4)
        if i:
            with small.exchange.outer_parameters(torch.nn.Linear(1, 1)):
                pass
        small.train(6)

    def run() -> Any:
        trains, evaluates = both(CONFIGS[name], acts)
        assert "island 1 (island1) is at step 4, we are at step 6" in trains
        assert "island 0 (island0) is at step 6, we are at step 4" in evaluates
        return True

    assert run_ranks(run, 1, 1) == [True]


def test_out_of_step_unlike_calls(run_ranks: Callable[..., Any]) -> None:
    """Unlike calls at one step cause an error on both sides that names both calls."""

    def acts(i: int, small: Small) -> None:
        small.train(4)
        if i:
            small.exchange.digests_equal()
        else:
            small.exchange.across_islands.all_equal("eval")

    def run() -> Any:
        asked, compared = both(CONFIGS["diloco"], acts)
        assert "a digest of parameters came from there, a question was expected" in asked
        assert "a question came from there, a digest of parameters was expected" in compared
        return True

    assert run_ranks(run, 1, 1) == [True]


def test_out_of_step_dropped_step(run_ranks: Callable[..., Any]) -> None:
    """A step that one loop drops causes an error that names `skip()`."""

    def acts(i: int, small: Small) -> None:
        small.train(3)
        small.exchange.step += i
        small.train(8)

    def run() -> Any:
        here, there = both(CONFIGS["demo"], acts)
        assert (
            "island 1 (island1) is at step 5, we are at step 4" in here
            and "skip()" in here
            and "skip()" in there
        )
        return True

    assert run_ranks(run, 1, 1) == [True]


def test_out_of_step_guard_exits_78(run_ranks: Callable[..., Any]) -> None:
    """`guard` ends with status 78, not 75, where islands are out of step."""

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), CONFIGS["diloco"])
        with fsdp_demo.guard(small.exchange, lambda: None, resume="python job.py --resume"):
            small.train(6 if me.island else 4)
            small.exchange.finish()

    outcomes = run_ranks(run, 2, 1, check=False)
    assert [o.status for o in outcomes] == [78, 78]
    assert all("for the steps of the others see fsdp-demo inspect" in o.log for o in outcomes)
    assert "once that is mended" in outcomes[0].log and "finished at step 4" in outcomes[1].log


# ---- texts of any length -----------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [2**31, 2**40, 2**47, 0])
def test_wire_claimed_length_refused(run_ranks: Callable[..., Any], claimed: int) -> None:
    """A length that a header claims falsely is refused before memory is taken."""

    def lies(piece: torch.Tensor, index: int) -> torch.Tensor:
        fields = list(header.HEADER.unpack(bytes(piece[: header.HEADER.size].tolist())))
        fields[7] = claimed
        forged = piece.clone()
        forged[: header.HEADER.size] = torch.tensor(list(header.HEADER.pack(*fields)))
        return forged

    def speak(line: Any) -> Any:
        if line.rank == 1:
            Tap(SimpleNamespace(_peers=line), lies)
        tracemalloc.start()
        with pytest.raises((WireError, PeerLost)) as caught:
            agreement.gather_json(line, {"here": line.rank})
        return str(caught.value), tracemalloc.get_traced_memory()[1]

    def run() -> Any:
        found = on_lines(speak, 2, timeout=5)
        (text, peak) = found[0]
        assert f"island 1 (island1) claims a text of {claimed} bytes" in text and peak < 1 << 22
        return True

    assert run_ranks(run, 1, 1) == [True]


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe\xfd", b"[" * 100_000])
def test_wire_text_not_json_refused(run_ranks: Callable[..., Any], body: bytes) -> None:
    """A text that is no JSON is refused, and the error names the sender."""

    def speak(line: Any) -> Any:
        if line.rank == 0:
            with pytest.raises(WireError, match=r"island 1 \(island1\) sent .* no JSON"):
                agreement.gather_json(line, [1])
            return True

        data = torch.frombuffer(bytearray(body), dtype=torch.uint8)
        line.gather_any(line.header(header.SETUP), data, agreement.LONGEST)
        return True

    assert run_ranks(lambda: on_lines(speak, 2, timeout=5), 1, 1) == [[True, True]]


# ---- replicas that are no longer equal ---------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["demo", "full", "diloco", "consensus", "streaming_diloco"])
def test_digest_flipped_bit_names_island(
    run_ranks: Callable[..., Any], everywhere: Any, name: str, count: int
) -> None:
    """A bit that flipped on one island causes an error that names the island and the tensors."""
    everywhere.setattr("fsdp_demo.exchange.runtime", "EVERY", 4)
    config = CONFIGS[name]

    def island(i: int, topology: Topology) -> Any:
        small = Small(topology, config)
        small.train(3)
        if i == 1:
            (channel,) = small.exchange.channels
            spoiled = small.params[0].data if channel.anchor is None else channel.anchor
            spoiled.view(-1).view(torch.int32)[7] ^= 1 << 3
        with pytest.raises(Mismatch) as caught:
            small.train(20)
        small.exchange.detach()
        return str(caught.value), small.exchange.step

    def run() -> Any:
        found = values(threaded.islands(island, count))
        what = "parameters" if config.channels[0].before_step else "outer parameters (anchors)"
        for text, step in found:
            assert (
                f"no longer equal: {what}" in text and "island 1 (island1)" in text and step <= 9
            ), text
            # of two nobody knows which is right
            assert ("island 0 (island0)" in text) == (count == 2)
        return True

    assert run_ranks(run, 1, 1) == [True]


def test_digest_unlike_machines_averaged(run_ranks: Callable[..., Any], everywhere: Any) -> None:
    """Between unlike machines a difference is logged, averaged away, and training goes on."""
    everywhere.setattr("fsdp_demo.exchange.runtime", "EVERY", 4)

    def run(me: Any) -> Any:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), CONFIGS["demo"])
        small.exchange._queue.watch.unlike = True
        small.train(3)
        small.params[0].data.view(-1)[7] += 1e-6 * me.island
        small.train(10)
        small.exchange.finish()
        whole = torch.cat([p.detach().view(-1) for p in small.params])
        return whole, small.exchange.digests_equal(), small.exchange.metrics()["drift"]

    outcomes = run_ranks(run, 2, 1, check=False)
    assert [o.status for o in outcomes] == [0, 0]
    for o in outcomes:
        assert "no longer equal" in o.log and "are the mean over the islands now" in o.log
        whole, equal, drift = o.value
        assert torch.equal(whole, outcomes[0].value[0]) and equal is True and 0 < drift < 1e-6


def test_digest_sums_and_odd_ones() -> None:
    """The sum of a digest counts all words of its tensors, and the majority tells which replica is
    odd.
    """
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        t = torch.randn(1000, generator=g).to(dtype)
        words = t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])
        assert (
            int(watch.total([t], t.device)) % 2**64 == sum(int(w) for w in words.tolist()) % 2**64
        )
        assert int(watch.total([t[:400], t[400:]], t.device)) == int(watch.total([t], t.device))
    assert int(watch.total([torch.empty(0)], torch.device("cpu"))) == 0
    assert [watch.odd_ones(v) for v in ([1, 1], [1, 2], [1, 1, 2], [1, 2, 3], [None, 2, 2], [None, 2, 3])] == [  # noqa: E501
        [], [0, 1], [2], [0, 1, 2], [], [1, 2],
    ]  # fmt: skip


# ---- the same rows -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "full", "random", "diloco", "consensus", "local_sgd"])
def test_same_rows_warned_once(run_ranks: Callable[..., Any], name: str) -> None:
    """Islands that train on the same rows are warned once."""
    config = CONFIGS[name]

    def run(me: Any, same: bool) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), config)
        for p in small.params:  # zeros first: what says nothing is not compared
            p.grad = torch.zeros_like(p)
        small.optimizer.step()
        small.island = 0 if same else small.island
        small.train(6)
        small.exchange.finish()

    for same in (True, False):
        logs = [o.log for o in run_ranks(run, 2, 1, check=False, args=(same,))]
        assert [log.count("sent the same first payload") for log in logs] == [int(same)] * 2, logs


@pytest.mark.parametrize("name", ["demo", "full"])
def test_same_rows_no_warning_alone(run_ranks: Callable[..., Any], name: str) -> None:
    """An island that is alone gets no warning of equal rows."""
    config = CONFIGS[name]

    def run(me: Any) -> None:
        logging.basicConfig(level=logging.INFO, force=True)
        small = Small(Topology.from_env(), config)
        if me.island == 1:
            return  # it is lost before its first message
        small.train(3)
        small.exchange.finish()

    logs = [o.log for o in run_ranks(run, 2, 1, check=False)]
    assert "training goes on with island 0" in logs[0], logs
    assert "sent the same first payload" not in logs[0], logs


def test_wire_every_message_has_header(run_ranks: Callable[..., Any]) -> None:
    """Every message of a run, set-up and questions included, begins with a header that says what it
    is.
    """

    def island(i: int, topology: Topology) -> Any:
        small = Small(topology, replace(CONFIGS["diloco"], clip=1.0, clip_scope="islands"))
        seen: list[tuple[int, int]] = []

        def note(data: torch.Tensor, index: int) -> torch.Tensor:
            magic, _, kind, _, digest, step, *_ = header.HEADER.unpack(
                bytes(data[: header.HEADER.size].tolist())
            )
            assert magic == header.MAGIC and digest == small.exchange.config.digest()
            seen.append((kind, step))
            return data

        Tap(small.exchange, note)
        small.train(2)
        small.exchange.across_islands.mean([1.0])
        small.exchange.digests_equal()
        small.exchange.finish()
        return seen

    def run() -> Any:
        first, second = values(threaded.islands(island))
        norm, pay, parts, means = header.NORM, header.PAYLOAD, header.PARTS, header.MEANS
        expected = [
            (norm, 0),
            (norm, 1),
            (pay, 1),
            (parts, 1),
            (means, 1),
            (header.QUESTION, 2),
            (header.DIGESTS, 2),
        ]
        assert first == second == [*expected, (header.DIGESTS, 2), (header.END, 2)]
        return True

    assert run_ranks(run, 1, 1) == [True]
