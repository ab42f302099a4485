"""What `codec.py` and `decode.py` time: one replica's work for one exchange of momentum
compression, in the published form and in ours.

Not a program. One layer of Llama-3.2-1B, cut along dim 0 over eight shards; no communication: what
the other replicas send is made ahead, outside the clock.

* `Published` is the algorithm of arXiv 2411.19870 as its equations say it, tensor by tensor, and is
  the yardstick only.
* `Ours` is the library's own path: an `ChannelRunner` over plain parameters, and the base
  optimizer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import fsdp_demo  # noqa: E402
from fsdp_demo import ExchangeConfig  # noqa: E402
from fsdp_demo.channels.channel import ChannelPayload, ChannelRunner, Incoming, Received  # noqa: E402
from fsdp_demo.channels.state import Placement  # noqa: E402
from fsdp_demo.compression import selection as selecting  # noqa: E402
from fsdp_demo.compression import sparse  # noqa: E402
from fsdp_demo.compression.transform import cpu_name, kernels, matrix, transform  # noqa: E402
from fsdp_demo.compression.windows import stretches  # noqa: E402
from fsdp_demo.config.parts import Codec  # noqa: E402
from fsdp_demo.hosts.torch_params import TorchHost  # noqa: E402
from tests.support.tensor_ledger import Ledger  # noqa: E402

BETA, LR, EDGE = 0.999, 1e-3, 64


def layer(hidden: int = 2048, shards: int = 8) -> list[tuple[int, int]]:
    """Local shapes of the matrices of one layer: query, key, value, output, gate, up, down."""
    small, wide = hidden // 4, 4 * hidden
    rows = [
        (hidden, hidden),
        (small, hidden),
        (small, hidden),
        (hidden, hidden),
        (wide, hidden),
        (wide, hidden),
        (hidden, wide),
    ]
    return [(r // shards, c) for r, c in rows]


def arguments(parser: argparse.ArgumentParser, repeat: int) -> argparse.Namespace | None:
    """Those of a benchmark of one layer, beside the parser's own. None, and said, where there is no
    such device.

    repeat: by default.
    """
    parser.add_argument(
        "--hidden", type=int, default=2048, help="width of the layer, a multiple of 256"
    )
    parser.add_argument("--shards", type=int, default=8, help="how many shards dim 0 is cut into")
    parser.add_argument("--repeat", type=int, default=repeat)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    args = parser.parse_args()
    if args.hidden % 256 or args.hidden // 4 % (64 * args.shards):
        parser.error(
            f"--hidden {args.hidden} --shards {args.shards}: a quarter of the width must be a "
            "multiple of 64 per shard"
        )
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no GPU here: nothing measured")
        return None
    return args


def here(device: str) -> dict[str, str]:
    """The machine, for the head of a json file."""
    if device.startswith("cuda"):
        return {"torch": torch.__version__, "device": torch.cuda.get_device_name(device)}
    cpu = f"{cpu_name()} ({kernels()})"
    selection = "torch" if selecting._kernels is None else "C"
    return {"torch": torch.__version__, "device": device, "cpu": cpu, "selection": selection}


def say_where(device: str) -> None:
    """Print `here`."""
    print(", ".join(f"{key} {value}" for key, value in here(device).items()))


def pin() -> None:
    """One thread on the first core that this process may use."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class Watch:
    """Seconds of named stages, summed over a round: the thread's own CPU time, or events on a GPU.
    `medians` over the rounds.
    """

    def __init__(self, device: str):
        self.cuda, self.rounds = device.startswith("cuda"), list[dict[str, float]]()

    def start(self) -> None:
        """A new round."""
        self.rounds.append({})

    def __call__(self, stage: str, work: Callable[[], Any]) -> Any:
        if not self.rounds:
            self.start()
        if self.cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            out = work()
            last.record()
            last.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            began = time.thread_time_ns()
            out = work()
            seconds = (time.thread_time_ns() - began) / 1e9
        self.rounds[-1][stage] = self.rounds[-1].get(stage, 0.0) + seconds
        return out

    def medians(self, elements: int) -> dict[str, float]:
        """Nanoseconds per element of each stage, and of the whole round ("all")."""
        found = {
            s: statistics.median(r[s] for r in self.rounds) / elements * 1e9 for s in self.rounds[0]
        }
        return {
            **found,
            "all": statistics.median(sum(r.values()) for r in self.rounds) / elements * 1e9,
        }


def edge(n: int) -> int:
    """The published edge of blocks along a dimension of n elements: its largest divisor up to
    64.
    """
    return max(e for e in range(1, EDGE + 1) if n % e == 0)


class Published:
    """m = beta m + lr g; q = the k largest of each DCT block of m; m -= q; theta -= lr sign(mean of
    all q over those who sent).
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], k: int, device: str):
        self.k = k
        self.d = {n: matrix("dct", n, device) for s in shapes for n in map(edge, s)}
        self.shapes = list(shapes)
        self.parameters = [torch.zeros(s, device=device) for s in shapes]
        self.momentum = [torch.zeros(s, device=device) for s in shapes]

    def forward(self, x: Tensor) -> Tensor:
        """Coefficients [y, x, 64, 64] of a matrix; of other edges where 64 does not divide it."""
        a, b = map(edge, x.shape)
        blocks = x.view(x.shape[0] // a, a, x.shape[1] // b, b).permute(0, 2, 1, 3).contiguous()
        return torch.einsum("...ij,ai,bj->...ab", blocks, self.d[a], self.d[b])

    def backward(self, c: Tensor, shape: tuple[int, int]) -> Tensor:
        """The matrix of coefficients."""
        a, b = (self.d[n] for n in c.shape[2:])
        return torch.einsum("...ab,ai,bj->...ij", c, a, b).permute(0, 2, 1, 3).reshape(shape)

    def largest(self, c: Tensor) -> tuple[Tensor, Tensor]:
        """Indices int64 and values fp32 [y, x, k]."""
        flat = c.flatten(2)
        index = torch.topk(flat.abs(), min(self.k, flat.shape[2]), dim=2, sorted=False).indices
        return index, flat.gather(2, index)

    def scattered(self, index: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
        """Coefficients, the mean over those who sent one, zero elsewhere."""
        edges = edge(shape[0]), edge(shape[1])
        out = values.new_zeros(*index.shape[:2], prod(edges))
        return out.scatter_reduce_(2, index, values, "mean", include_self=False).unflatten(2, edges)

    def send(
        self, gradients: Sequence[Tensor], watch: Callable[..., Any]
    ) -> list[tuple[Tensor, Tensor]]:
        """What leaves, per tensor."""
        watch(
            "momentum",
            lambda: [
                m.mul_(BETA).add_(g, alpha=LR)
                for m, g in zip(self.momentum, gradients, strict=True)
            ],
        )
        coefficients = watch("transform", lambda: [self.forward(m) for m in self.momentum])
        sent = watch("selection", lambda: [self.largest(c) for c in coefficients])
        coefficients.clear()
        own = watch(
            "own decode",
            lambda: [
                self.backward(self.scattered(*q, s), s)
                for q, s in zip(sent, self.shapes, strict=True)
            ],
        )
        watch("residual", lambda: [m.sub_(o) for m, o in zip(self.momentum, own, strict=True)])
        return list(sent)

    def receive(
        self, sent: Sequence[list[tuple[Tensor, Tensor]]], watch: Callable[..., Any]
    ) -> None:
        """`sent`: of every replica."""

        def decode(t: int, shape: tuple[int, int]) -> Tensor:
            index, values = (torch.cat([q[t][part] for q in sent], 2) for part in (0, 1))
            return self.backward(self.scattered(index, values, shape), shape)

        means = watch("decode", lambda: [decode(t, s) for t, s in enumerate(self.shapes)])
        watch(
            "apply",
            lambda: [
                p.add_(m.sign_(), alpha=-LR) for p, m in zip(self.parameters, means, strict=True)
            ],
        )


class Ours:
    """An `ChannelRunner` over plain parameters, stepped by SGD.

    Args:
        config: with one gradient channel.
        size: number of replicas.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], config: ExchangeConfig, size: int, device: str
    ):
        self.named = [
            (f"layers.0.{i}.weight", nn.Parameter(torch.zeros(s, device=device)))
            for i, s in enumerate(shapes)
        ]
        self.optimizer = fsdp_demo.base_optimizer(config, self.named, lr=LR)
        (channel,) = config.channels
        self.channel = ChannelRunner(channel, Placement(TorchHost([self.optimizer]), islands=size))
        self.channel.start()
        self._body: Tensor | None = None

    @torch.no_grad()
    def send(self, gradients: Sequence[Tensor], watch: Callable[..., Any]) -> ChannelPayload:
        """What leaves."""
        for (_, p), g in zip(self.named, gradients, strict=True):
            p.grad = g
        watch("momentum, transform", self._accumulate)
        out: ChannelPayload = watch("selection, codes, residual", self._encode)
        self._body = out.body
        return out

    def _encode(self) -> ChannelPayload:
        out = self.channel.encode(0, None)
        self.channel.subtract(out)
        return out

    def _accumulate(self) -> None:
        self.channel.accumulate()

    @torch.no_grad()
    def receive(self, bodies: Sequence[Tensor], watch: Callable[..., Any]) -> None:
        """`bodies`: of every replica."""
        watch("decode, gradient", lambda: self._decode(bodies))
        watch("apply", self.optimizer.step)

    def _decode(self, bodies: Sequence[Tensor]) -> None:
        received = Received(bodies, [], [1.0] * len(bodies))
        self.channel.apply(Incoming(ChannelPayload(0), received, [True] * len(self.named)))

    def chosen(self) -> list[Tensor]:
        """Places in the blocks, int64 [blocks, k], that were sent last, per tensor."""
        layout, section, body = self.channel.layout, self.channel.section, self._body
        assert layout is not None and section is not None and body is not None
        coded, codec = sparse.split(layout, section.codec, [body]), section.codec
        places = torch.cat(
            [
                sparse.decode_window(s, coded[s.group], codec)[0][0]  # type: ignore[index]
                for s in stretches(layout.windows(body.device), body.device, codec.topk)
            ]
        )
        found = {p.region.tensor: places[p.start : p.start + p.hi - p.lo] for p in layout.pieces}
        return [found[t] for t in range(len(self.named))]

    def residuals(self) -> list[Tensor]:
        """The accumulator in the element domain, per tensor."""
        layout, out = self.channel.layout, [torch.zeros_like(p) for _, p in self.named]
        assert layout is not None and self.channel.accumulator is not None
        layout.unpack(
            transform(Codec("dct", "topk"), layout, self.channel.accumulator.clone(), inverse=True),
            out,
        )
        return out

    @property
    def count(self) -> int:
        """Coefficients that it sends."""
        section = self.channel.section
        return (
            sum(g.count * g.k(section.codec.topk) for g in section.layout.groups)
            if section is not None
            else 0
        )


def silent(_: str, work: Callable[[], Any]) -> Any:
    """A watch that does not look."""
    return work()


def temporaries(work: Callable[[], Any]) -> int:
    """The most bytes of tensors that `work` held at once beyond what there was."""
    ledger = Ledger()
    with ledger:
        kept = work()
    del kept
    return ledger.most["device"]


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Of all matrices."""
    return sum(prod(s) for s in shapes)
