"""How much an exchange gives a GPU to do, counted on the stand-in (`support/accelerator.py`) for
one rank's eighth of Llama-3.2-1B, whose values are left out.
"""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from fsdp_demo import preset
from fsdp_demo.channels.channel import ChannelRunner, Incoming, Received
from fsdp_demo.channels.state import Placement
from fsdp_demo.exchange.plan import local_shape, plan_memory
from fsdp_demo.hosts.torch_params import TorchHost
from fsdp_demo.tools.planner import load

from ..support.accelerator import Accelerator, There, pin, plug_in
from ..support.device_work import DeviceWork

R, SHARDS = 2, 8


def second_exchange(name: str) -> tuple[DeviceWork, int]:
    """What the second exchange of a preset does, and the bytes that it takes for a while."""
    with torch.no_grad(), plug_in(), Accelerator() as mode, DeviceWork(shapes_only=True) as work:
        mode.lenient = True
        named = [
            (n, nn.Parameter(There(torch.empty(local_shape(s, SHARDS, 0), device="meta"))))
            for n, s in load("llama-3.2-1b")
        ]
        for _, p in named:
            p.grad = There(torch.empty(p.shape, device="meta"))
        channel = preset(name).channels[0]
        runner = ChannelRunner(channel, Placement(TorchHost([torch.optim.SGD(named)]), islands=R))
        runner.start()
        for number in range(2):
            kept = work.begin()
            out = runner.encode(number * channel.schedule.sync_every, runner.accumulate())
            runner.subtract(out)
            bodies = [] if out.body is None else [torch.zeros(out.body.shape, dtype=torch.uint8)]
            means = [torch.zeros(v.shape) for v in out.vectors] if out.body is None else []
            received = Received([pin(b) for b in bodies * R], [pin(m) for m in means], [1.0] * R)
            runner.apply(Incoming(out, received, out.present))
    return work, work.most - kept


@pytest.mark.parametrize(
    ("name", "operations", "bytes_per_element"),
    [
        ("demo", 840, 97),
        ("sparse_loco", 780, 120),
        ("sign_loco", 800, 147),
        ("decoupled_momentum", 650, 101),
        pytest.param("muloco", 1900, 348, marks=pytest.mark.slow),
        ("diloco", 340, 80),
    ],
)
def test_device_work_and_memory(name: str, operations: int, bytes_per_element: int) -> None:
    """An exchange gives a GPU no more operations and bytes to move than it did, and takes no more
    memory than is planned.
    """
    tensors = load("llama-3.2-1b")
    work, taken = second_exchange(name)
    assert work.operations.total() <= operations
    elements = sum(prod(local_shape(s, SHARDS, 0)) for _, s in tensors)
    assert work.bytes <= bytes_per_element * elements
    plan = plan_memory(preset(name), tensors, islands=R, shards=SHARDS)
    planned = plan.device_flight + plan.device_workspace
    assert 0.5 * planned <= taken <= planned
