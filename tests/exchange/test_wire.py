"""Texts and headers between islands: each message has a header, and a false one is refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsdp_demo import PeerLost, Topology, WireError
from fsdp_demo.elastic import agreement
from fsdp_demo.peers import header

from ..elastic.test_peer_group import on_lines
from ..support import threaded
from ..support.inside import in_ranks
from ..support.small import Small
from ..support.threaded import Tap, values
from .test_out_of_step import CONFIGS


@pytest.mark.parametrize("claimed", [2**31, 2**40, 2**47, 0])
@in_ranks(1, 1)
def test_wire_claimed_length_refused(claimed: int) -> None:
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

    found = on_lines(speak, 2, timeout=5)
    text, peak = found[0]
    assert f"island 1 (island1) claims a text of {claimed} bytes" in text and peak < 1 << 22


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


@in_ranks(1, 1)
def test_wire_every_message_has_header() -> None:
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

    first, second = values(threaded.islands(island))
    norm, pay, parts, means = header.NORM, header.PAYLOAD, header.PARTS, header.MEANS
    expected = [
        (norm, 0), (norm, 1), (pay, 1), (parts, 1), (means, 1), (header.QUESTION, 2),
        (header.DIGESTS, 2),
    ]  # fmt: skip
    assert first == second == [*expected, (header.DIGESTS, 2), (header.DIGESTS, 2), (header.END, 2)]
