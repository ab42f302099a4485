"""Messages under way that releases with 12 bits for each position (formats 1 and 2) have saved."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.channels.codec import ChannelCodec
from fsdp_demo.checkpoint.earlier import with_positions_of_today
from fsdp_demo.checkpoint.exchange_state import describe_part
from fsdp_demo.checkpoint.files import copied, read_part, write_part
from fsdp_demo.compression import positions, sparse
from fsdp_demo.compression.windows import EDGE

from ..oracles import twelve_bits
from ..support.threaded import islands, values


def packed(section: ChannelCodec, body: torch.Tensor) -> torch.Tensor:
    """A section as it was: values, then 64 row + column in 12 bits, group by group."""
    layout, codec, out = section.layout, section.codec, []
    end = 0
    for g, (begin, middle, end) in zip(layout.groups, sparse.spans(layout, codec), strict=True):
        form = sparse.position_form(g, codec.topk)
        index = positions.decode(form, form.split(body[middle:end], g.count), g.count)
        slots = index // g.s * EDGE + index % g.s
        out += [body[begin:middle], twelve_bits.pack12(slots)]
    return torch.cat([*out, body[end:]])


def under_way(code: str) -> Any:
    def island(i: int, topology: fsdp_demo.Topology) -> Any:
        torch.manual_seed(i)
        model = torch.nn.Sequential(torch.nn.Linear(130, 70), torch.nn.Linear(70, 3))
        config = preset("demo", topk=9, value_dtype=code, **{"schedule.delay": 2})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        exchange = fsdp_demo.attach(optimizer, config, model=model, topology=topology)
        for _ in range(4):
            model(torch.randn(5, 130)).square().sum().backward()
            optimizer.step()
        head, tree = describe_part(exchange), copied(exchange.state_dict())
        section = exchange.channels[0].section
        exchange.finish()
        assert section is not None
        before = copied(tree)
        for flight in before["in_flight"]:
            assert flight["arrived"] is not None
            for out in flight["parts"].values():
                out["body"] = packed(section, out["body"])
            first = len(flight["arrived"]["bodies"][0]) - section.num_bytes
            assert first == 1  # presence of four tensors
            flight["arrived"]["bodies"] = [
                torch.cat([b[:first], packed(section, b[first:])])
                for b in flight["arrived"]["bodies"]
            ]
        return head, tree, before

    return values(islands(island))[0]


def bodies(tree: Any) -> list[torch.Tensor]:
    found = [out["body"] for f in tree["in_flight"] for out in f["parts"].values()]
    return found + [b for f in tree["in_flight"] for b in f["arrived"]["bodies"]]


def as_format_2(path: Path) -> None:
    part = json.loads(json.loads(path.read_text())["part"])
    part["head"] |= {"format": 2, "package": "0.2.0"}
    text = json.dumps(part)
    path.write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "part": text}))


@pytest.mark.parametrize("code", ["int8", "fp32"])
def test_they_are_read_as_they_would_be_saved_today(
    run_ranks: Any, code: str, tmp_path: Path
) -> None:
    head, tree, before = run_ranks(lambda: under_way(code), 1, 1)[0]
    assert len(tree["in_flight"]) == 2
    today, then = bodies(tree), bodies(before)
    assert all(len(a) < len(b) for a, b in zip(today, then, strict=True))
    assert all(map(torch.equal, bodies(with_positions_of_today(head, before)), today))
    # through files
    write_part(tmp_path, "rank0", head, before)
    as_format_2(tmp_path / "rank0.json")
    assert all(map(torch.equal, bodies(read_part(tmp_path / "rank0.json")[1]), today))
    # of today's format they are taken as they are
    write_part(tmp_path, "rank1", head, tree)
    assert all(map(torch.equal, bodies(read_part(tmp_path / "rank1.json")[1]), today))


def test_one_of_another_length_names_its_writer(run_ranks: Any, tmp_path: Path) -> None:
    head, _, before = run_ranks(lambda: under_way("int8"), 1, 1)[0]
    before["in_flight"][0]["arrived"]["bodies"][1] = torch.zeros(7, dtype=torch.uint8)
    write_part(tmp_path, "rank0", head, before)
    as_format_2(tmp_path / "rank0.json")
    with pytest.raises(
        ValueError, match=r"format 2 and messages under way.*it has 6 bytes.*with fsdp_demo 0\.2\.0"
    ):
        read_part(tmp_path / "rank0.json")
