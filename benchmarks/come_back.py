"""What the return of a killed island costs over a slow link: seconds, bytes, loss.

    sudo fsdp-demo rehearse --islands 2 --procs 1 --cpu --launcher torchrun --link 100Mbit --restarts 1 -- benchmarks/come_back.py --exchange diloco --out outputs/back
    fsdp-demo rehearse --islands 2 --procs 1 --cpu --launcher torchrun -- benchmarks/come_back.py --exchange diloco --kill 0 --out outputs/whole

Both islands train a model of 29 M parameters on English text (`RunState`, AdamW where the method
leaves the choice). Island 1 kills itself at step `--kill` and is started again. Until then a step
takes `--pause` seconds more, in which an accelerator would compute. OUT/island<i>.json holds the
losses by step, and of the island that came back the seconds from its start to the end of its first
step (`first`; of the processor: `cpu`), those in `attach` alone, and what its log said. `--kill 0`
gives the losses to compare with.
"""  # noqa: E501

from __future__ import annotations

import time

BEGAN = time.monotonic()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from pydoc_data.topics import topics  # noqa: E402

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

import fsdp_demo  # noqa: E402
from benchmarks.common import Parser  # noqa: E402
from fsdp_demo.checkpoint import CheckpointManager, RunState  # noqa: E402

ROWS, LENGTH, WIDTH, LAYERS = 2, 64, 576, 7


class Model(torch.nn.Module):
    """A small causal transformer over bytes."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.embed = torch.nn.Embedding(256, WIDTH)
        self.place = torch.nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = torch.nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
        return self.head(self.layers(self.embed(x) + self.place, mask=mask, is_causal=True))


class Lines(logging.Handler):
    """What the log has said of the return."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "MiB fetched" in (text := record.getMessage()):
            self.texts.append(text)


def rows(text: torch.Tensor, step: int, island: int) -> torch.Tensor:
    """Tokens [ROWS, LENGTH + 1] of one step of one island: data follow the step."""
    generator = torch.Generator().manual_seed(1000 * step + island)
    starts = torch.randint(len(text) - LENGTH - 1, (ROWS,), generator=generator)
    return torch.stack([text[s : s + LENGTH + 1] for s in starts]).long()


def parsed() -> argparse.Namespace:
    parser = Parser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--exchange", default="diloco")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kill", type=int, default=25)
    parser.add_argument("--save", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--steps", type=int, default=600, help="at most")
    parser.add_argument("--behind", type=int, default=50, help="steps after the return")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds per step until then")
    return parser.parse_args()


def main() -> None:
    args = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    (log := logging.getLogger("fsdp_demo")).addHandler(lines := Lines())
    log.setLevel(logging.INFO)
    topology, model = fsdp_demo.Topology.from_env(), Model()
    changes = {"period": args.save} if args.exchange == "diloco" else {}
    config = fsdp_demo.preset(args.exchange, **changes)
    optimizer = fsdp_demo.base_optimizer(config, model.named_parameters(), lr=config.lr or 3e-4)
    args.out.mkdir(parents=True, exist_ok=True)
    died, back = args.out / "died", args.out / "back"
    state = RunState(CheckpointManager(args.out / topology.name, topology), model, optimizer)
    state.restore("auto")
    asked = time.monotonic()
    exchange = fsdp_demo.attach(
        optimizer, config, model=model, topology=topology, step=state.step, state=state.saved
    )
    facts = {"attach": time.monotonic() - asked, "step": exchange.step}
    if exchange.newcomer:
        back.write_text(str(exchange.step))
    text = torch.frombuffer(bytearray("".join(topics.values()).encode()), dtype=torch.uint8)
    losses, kills = {}, topology.island == 1 and args.kill and not died.exists()
    last = args.steps
    while exchange.step < last:
        step = exchange.step
        if kills and step == args.kill:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if last == args.steps and args.kill:
            time.sleep(args.pause)
        x = rows(text, step, topology.island)
        loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
        facts.setdefault("first", time.monotonic() - BEGAN)
        facts.setdefault("cpu", time.process_time())
        if last == args.steps and back.exists() and back.read_text():
            last = int(back.read_text()) + args.behind
        if exchange.step % args.save == 0 and not back.exists():
            state.save(exchange)
    exchange.finish()
    found = facts | {"losses": losses, "said": lines.texts}
    (args.out / f"island{topology.island}.json").write_text(json.dumps(found))
    print(topology.name, facts, lines.texts, flush=True)


if __name__ == "__main__":
    main()
