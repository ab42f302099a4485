"""What a run tells: a progress bar, `metrics.jsonl`, `summary.json`, `report.png` and a table.
Nothing here changes the training.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_demo import ring_all_reduce_bytes
from fsdp_demo.planner.devices import PEAK


def full_bytes(parameters: int, steps: int, islands: int) -> int:
    """Bytes one island sends when bf16 gradients are ring all-reduced over the islands at every
    step.
    """
    return ring_all_reduce_bytes(islands, 2 * parameters) * steps


def peak_flops(device: torch.device, given: float | None = None) -> float | None:
    """Flops per second of one device in bf16: `given` in 1e12, or by its name; None if nobody knows
    (a CPU, another GPU).
    """
    if given is not None:
        return given * 1e12
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((1e12 * peak for known, peak in PEAK.items() if known in name), None)


def flops_per_token(model: Any, length: int) -> float:
    """Of a dense model's forward and backward: 6 per parameter, and 12 * layers * width * length
    for attention (PaLM, appendix B).

    The input embedding is looked up, not multiplied, so it counts only where it is also the head.
    As in PaLM the causal mask saves nothing, and what activation checkpointing computes again is
    not counted.
    """
    count, config = sum(p.numel() for p in model.parameters()), model.config
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or head.weight is not embedding.weight:
        count -= embedding.weight.numel()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 6.0 * count + 12.0 * config.num_hidden_layers * width * length


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors took on this rank's GPU, or the most that the process took on a
    CPU.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.3g} TB"


def table(rows: list[list[str]], markdown: bool = False) -> str:
    """Aligned columns; the first row is the head, the first column is left-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in rows
    ]
    if not markdown:
        return "\n".join("  ".join(row) for row in padded)
    lines = ["| " + " | ".join(row) + " |" for row in padded]
    lines.insert(1, "|" + "|".join(["---", *["---:"] * (len(widths) - 1)]) + "|")
    return "\n".join(lines)


class Report:
    """Counts on every rank, writes on the main process of each island, shows a bar on island 0
    only.

    Args:
        accelerator: for the means over the ranks of this island, once per `log_every` steps.
        exchange: its `metrics()` are read, never changed.
        facts: what goes into the summary as it is (model, seed...).
        parameters: number of parameters of the whole model.

    In a mesh the accelerator's ranks are those of all islands, and the one main process writes for
    all.
    """

    def __init__(
        self,
        accelerator: Any,
        exchange: Any,
        output: Path,
        *,
        steps: int,
        log_every: int,
        parameters: int,
        facts: dict[str, Any],
    ):
        self.accelerator, self.exchange, self.steps, self.log_every = (
            accelerator,
            exchange,
            steps,
            log_every,
        )
        self.topology, self.output, self.facts, self.parameters = (
            exchange.topology,
            output,
            facts,
            parameters,
        )
        self.folder = output / self.topology.name
        # at the start; who joins or is lost later is not counted
        self.islands = self.topology.count
        self.worlds = 1 if self.topology.kind == "mesh" else self.islands
        self.procs = accelerator.num_processes * self.worlds // self.islands
        self.flops: float | None = None
        self.main = accelerator.is_main_process
        self.start = self.step = exchange.step
        self.losses: list[torch.Tensor] = []
        self.tokens = 0.0  # of this rank, or its share of them
        self.validation: list[list[float]] = []
        self.history: list[dict[str, Any]] = []
        self.began, self.evaluating, self.bar = time.monotonic(), 0.0, None
        # what others count, for each line and the summary
        self.counters: Callable[[], dict[str, Any]] = dict
        # of earlier starts: bytes of an all-reduce, up to the step where this one begins
        self.full, self.since = 0, self.start
        self.before = {
            "bytes_sent": 0,
            "exchanges": 0,
            "seconds_waiting": 0.0,
            "seconds_exchanging": 0.0,
        }
        if self.main:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.file = open(
                self.folder / "metrics.jsonl", "a" if self.start else "w", encoding="utf-8"
            )
            self.bar = self._bar() if self.topology.island == 0 else None

    def _bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(
            total=self.steps,
            initial=self.start,
            unit="step",
            mininterval=0.5,
            dynamic_ncols=True,
            file=sys.stderr,
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's counters, as JSON values."""
        return {
            "step": self.step,
            "losses": [float(v) for v in self.losses],
            "tokens": self.tokens,
            "validation": self.validation,
            "history": self.history,
            "seconds": time.monotonic() - self.began,
            "evaluating": self.evaluating,
            "before": {key: value for key, value in self._metrics().items() if key in self.before},
            "bytes_full": self._bytes_full(),
            "islands": self.islands,
            "procs": self.procs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a `state_dict()`; lines of metrics.jsonl that came after it go. All
        totals are those of the job: where other islands or ranks go on, they share what the earlier
        ones have counted.
        """
        procs = state.get("procs", self.procs)
        islands = state.get("islands", self.islands)
        self.start, self.step, self.since = 0, state["step"], state["step"]
        self.tokens = state["tokens"] * procs * islands / (self.procs * self.islands)
        self.full = state.get("bytes_full", full_bytes(self.parameters, self.since, self.islands))
        self.losses = [torch.tensor(v, device=self.accelerator.device) for v in state["losses"]]
        self.validation, self.history, self.before = (
            state["validation"],
            state["history"],
            {**state["before"]},
        )
        self.before["bytes_sent"] *= procs / self.procs
        self.began, self.evaluating = time.monotonic() - state["seconds"], state["evaluating"]
        if self.main:
            self.file.close()
            path = self.folder / "metrics.jsonl"
            lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
            # a run that was killed may have left half a line
            whole = [line for line in lines if line.endswith("}\n")]
            path.write_text(
                "".join(line for line in whole if json.loads(line)["step"] <= self.step), "utf-8"
            )
            self.file = open(path, "a", encoding="utf-8")

    def _metrics(self) -> dict[str, Any]:
        """The exchange's, with what was counted before a resume."""
        metrics = self.exchange.metrics()
        return metrics | {key: metrics[key] + value for key, value in self.before.items()}

    def _bytes_full(self) -> int:
        """What an all-reduce at every step would have sent, each step over the islands it had."""
        here = full_bytes(self.parameters, self.step - self.since, self.islands)
        return int(self.full + here)

    def count_flops(self, per_token: float, peak: float | None) -> None:
        """Report MFU: the model's flops as a share of the peak of all devices; without a peak it
        stays unknown.
        """
        self.flops = per_token / (peak * self.procs * self.islands) if peak else None

    def micro_batch(self, loss: torch.Tensor, tokens: int) -> None:
        self.losses.append(loss.detach())
        self.tokens += tokens

    def optimizer_step(self, lr: float) -> None:
        """Once per optimizer step, on every rank."""
        self.step += 1
        if self.bar is not None:
            self.bar.update()
        if self.step % self.log_every and self.step != self.steps:
            return
        values = self._island()
        self.losses.clear()
        if not self.main:
            return
        speed = values["tokens"] / self._seconds()
        line = {
            "step": self.step,
            "lr": lr,
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            **values,
            **self.counters(),
        }
        self.history.append(line)
        print(json.dumps(line), file=self.file, flush=True)
        if self.bar is not None:
            postfix = (
                f"loss {line['loss']:.3f}, {line['tokens_per_second']:.0f} tokens/s, sent "
                f"{size(line['bytes_sent'])} per island"
            )
            self.bar.set_postfix_str(postfix, refresh=False)

    def evaluated(self, loss: float, seconds: float) -> None:
        self.evaluating += seconds
        self.validation.append([self.step, loss, self._island()["bytes_sent"]])
        if self.bar is not None:
            self.bar.write(f"step {self.step}: validation loss {loss:.4f}", file=sys.stderr)

    def finish(self, digests_equal: bool | None) -> dict[str, Any]:
        """Write what there is to write; returns the summary (the same numbers on every rank of an
        island, seconds aside).
        """
        values, metrics, islands = self._island(), self._metrics(), self.islands
        seconds = time.monotonic() - self.began
        sent, full = int(values["bytes_sent"]), self._bytes_full()
        speed = values["tokens"] / self._seconds()
        summary = {
            "preset": self.exchange.config.preset,
            "islands": islands,
            "participants": list(self.exchange.participants),
            "procs": self.procs,
            "steps": self.steps,
            "since": self.start,
            "tokens": int(values["tokens"]),
            "parameters": self.parameters,
            "loss_start": self.validation[0][1],
            "loss_end": self.validation[-1][1],
            "global_loss": values["global_loss"],
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            "peak_memory": values["peak_memory"],
            "exchanges": metrics["exchanges"],
            "bytes_sent_per_island": sent,
            "bytes_full_per_island": full,
            "ratio": full / sent if sent else None,
            "digests_equal": digests_equal,
            "drift": self.exchange.drift,
            "wait_share": values["seconds_waiting"] / seconds,
            "seconds": seconds,
            "validation": self.validation,
            "hidden": hidden(metrics),
            **self.counters(),
            **self.facts,
        }
        if self.bar is not None:
            self.bar.close()
        if self.main:
            self.file.close()
            with open(self.folder / "timeline.jsonl", "w", encoding="utf-8") as file:
                for flown in self.exchange.timeline():
                    print(json.dumps(vars(flown)), file=file)
            for folder in (
                {self.folder, self.output} if self.topology.island == 0 else {self.folder}
            ):
                (folder / "summary.json").write_text(
                    json.dumps(summary, indent=2) + "\n", encoding="utf-8"
                )
        if self.main and self.topology.island == 0:
            draw(self.output / "report.png", self.history, summary, self.exchange.timeline())
            print(
                "\n".join(f"{name:<28}{value}" for name, value in self._rows(summary)), flush=True
            )
        return summary

    def _seconds(self) -> float:
        return max(time.monotonic() - self.began - self.evaluating, 1e-9)

    def _mfu(self, tokens_per_second: float) -> float | None:
        return None if self.flops is None else tokens_per_second * self.flops

    def _island(self) -> dict[str, Any]:
        """What the ranks of this island, in a mesh of all, count together (a collective).

        Means: loss, waiting, and `global_loss`, which every rank got from its peers with the last
        exchange. Tokens are those of all islands, bytes those of one, memory is that of the rank
        which took most.
        """
        metrics = self._metrics()
        loss = torch.stack(self.losses).float().mean().item() if self.losses else 0.0
        everywhere = math.nan if metrics["loss"] is None else metrics["loss"]
        counts = [
            metrics["bytes_sent"],
            metrics["seconds_waiting"],
            peak_memory(self.accelerator.device),
        ]
        mine = torch.tensor(
            [[loss, everywhere, self.tokens, *counts]],
            dtype=torch.float64,
            device=self.accelerator.device,
        )
        ranks = self.accelerator.gather(mine)
        loss, everywhere, _, _, waiting, _ = ranks.mean(0).tolist()
        _, _, tokens, sent, _, _ = ranks.sum(0).tolist()
        return {
            "loss": loss,
            "global_loss": None if math.isnan(everywhere) else everywhere,
            "tokens": round(tokens * self.worlds),
            "bytes_sent": round(sent * self.worlds / self.islands),
            "seconds_waiting": waiting,
            "peak_memory": int(ranks[:, 5].max()),
        }

    def _rows(self, summary: dict[str, Any]) -> list[list[str]]:
        agree = {True: "yes, bit for bit", False: "NO", None: "not expected by this preset"}[
            summary["digests_equal"]
        ]
        count, left = summary["islands"], summary["participants"]
        whole = left in ([], list(range(count)))
        who = f"{len(left)} at the end ({', '.join(map(str, left))})"
        if len(left) == 1:
            agree = "one island is left"
        elif not whole:
            agree += f", of the {who}"
        rows = [
            [
                "preset",
                f"{summary['preset']}, {_shape(summary)}, {counted(summary['steps'], 'step')}",
            ],
            *([] if whole else [["islands", f"{count} began, {who}"]]),
            *([["counted since step", str(summary["since"])]] if summary["since"] else []),
            [
                "validation loss",
                f"{summary['loss_start']:.3f} before, {summary['loss_end']:.3f} after",
            ],
            [
                f"training loss, {'all islands' if whole else 'at the end'}",
                "-" if summary["global_loss"] is None else f"{summary['global_loss']:.3f}",
            ],
            [
                "tokens/s, " + ("all islands" if whole else f"as of {counted(count, 'island')}"),
                f"{summary['tokens_per_second']:.0f}",
            ],
            ["peak memory of a rank", size(summary["peak_memory"])],
            ["each island sent", size(summary["bytes_sent_per_island"])],
            ["bf16 all-reduce would send", size(summary["bytes_full_per_island"])],
            [
                "ratio",
                f"{summary['ratio']:.1f} x fewer bytes" if summary["ratio"] else "nothing was sent",
            ],
            ["time spent waiting", f"{summary['wait_share']:.1%}"],
        ]
        if summary["mfu"] is not None:
            rows.insert(-5, ["MFU, of the bf16 peak", f"{summary['mfu']:.1%}"])
        if summary["hidden"] and any(
            flown.applied > flown.step for flown in self.exchange.timeline()
        ):
            rows.append(
                ["hidden behind training", f"{summary['hidden']:.0%} of the exchanges' time"]
            )
        rows += [["islands agree", agree]] if summary["islands"] > 1 else []
        return (
            rows
            if summary["drift"] is None
            else [*rows, ["drift before the end", f"{summary['drift']:.2e}"]]
        )


def counted(number: int, word: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def _shape(summary: dict[str, Any]) -> str:
    return f"{counted(summary['islands'], 'island')} x {counted(summary['procs'], 'rank')}"


def hidden(metrics: dict[str, Any]) -> float | None:
    """Share of the seconds of all exchanges in which training went on."""
    exchanging = metrics["seconds_exchanging"]
    return max(0.0, 1.0 - metrics["seconds_waiting"] / exchanging) if exchanging else None


def draw(
    path: Path, history: list[dict[str, Any]], summary: dict[str, Any], timeline: list[Any]
) -> None:
    """Loss over steps and over bytes sent by one island; with delays also a timeline: for each
    channel the steps with an exchange in flight. Left out without matplotlib (extra `report`)."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    late = [flown for flown in timeline if flown.applied > flown.step]
    figure = plt.figure(figsize=(10, 6 if late else 4), layout="constrained")
    grid = figure.add_gridspec(2 if late else 1, 2, height_ratios=[2, 1] if late else [1])
    left = figure.add_subplot(grid[0, 0])
    panels = [left, figure.add_subplot(grid[0, 1], sharey=left)]
    losses, held_out = [line["loss"] for line in history], [v[1] for v in summary["validation"]]
    axes = (("step", 0, 1, "optimizer step"), ("bytes_sent", 2, 1e-6, "MB sent by each island"))
    for panel, (key, column, scale, label) in zip(panels, axes, strict=True):
        panel.plot(
            [line[key] * scale for line in history],
            losses,
            color="#9aa5b1",
            lw=1.2,
            label="training",
        )
        x = [v[column] * scale for v in summary["validation"]]
        panel.plot(x, held_out, "o-", color="#0b6e99", lw=1.6, ms=4, label="validation")
        panel.set_xlabel(label)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss (nats per token)")
    panels[0].legend(frameon=False)
    if late:
        strip, names = (
            figure.add_subplot(grid[1, :], sharex=left),
            sorted({name for flown in late for name in flown.channels}),
        )
        for row, name in enumerate(names):
            bars = [
                (flown.step + 1, flown.applied - flown.step)
                for flown in late
                if name in flown.channels
            ]
            strip.broken_barh(bars, (row - 0.4, 0.8), color="#0b6e99")
        strip.set_yticks(range(len(names)), names)
        strip.set_xlabel("optimizer step (bars: an exchange of the channel is in flight)")
        strip.spines[["top", "right"]].set_visible(False)
    saved = (
        f", {summary['ratio']:.0f} x fewer bytes than a bf16 all-reduce" if summary["ratio"] else ""
    )
    figure.suptitle(
        f"{summary['preset']}: {_shape(summary)}{saved}",
        fontsize=11,
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)
