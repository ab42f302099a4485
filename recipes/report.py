"""What a run tells: a line of progress, the files that `fsdp-demo report` reads
(`fsdp_demo/runlog/files.py`), its report at the end, and a table. Nothing here changes training.
"""

from __future__ import annotations

import logging
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fsdp_demo import ring_all_reduce_bytes
from fsdp_demo.errors import counted
from fsdp_demo.runlog import (
    ProgressLine,
    RunRecord,
    ledger_rows,
    size,
    spared,
    summarise,
    table,
    tracked,
    write_json,
)
from fsdp_demo.tools.planner import PEAK
from fsdp_demo.tools.report import make

__all__ = ["Report", "flops_per_token", "full_bytes", "log_lines", "peak_flops", "peak_memory"]
__all__ += ["size", "table"]


def log_lines(first: bool) -> None:
    """Log lines as they are; what the library tells, from the first rank of an island."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fsdp_demo").setLevel(logging.INFO if first else logging.WARNING)


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


class Report:
    """Counts on every rank, writes on the main process of each island.

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
        self.worlds = 1 if self.topology.one_world else self.islands
        self.procs = accelerator.num_processes * self.worlds // self.islands
        self.flops: float | None = None
        self.main = accelerator.is_main_process
        self.start = self.step = exchange.step
        self.losses: list[torch.Tensor] = []
        # of all islands so far; of these, counted before the exchange began anew
        self.tokens = self.earlier = 0
        self.validation: list[list[float]] = []
        self.began, self.evaluating = time.monotonic(), 0.0
        self.progress: ProgressLine | None = None
        self.tracks = False  # the accelerator has trackers
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
            self.record = RunRecord(
                self.folder,
                exchange,
                steps=steps,
                parameters=parameters,
                procs=self.procs,
                facts=facts | ({"mesh": True} if self.topology.one_world else {}),
            )
            self.progress = ProgressLine(exchange, steps)

    def state_dict(self) -> dict[str, Any]:
        """This rank's counters, as JSON values."""
        return {
            "step": self.step,
            "losses": [float(v) for v in self.losses],
            "counted": self.tokens,
            "validation": self.validation,
            "seconds": time.monotonic() - self.began,
            "evaluating": self.evaluating,
            "before": {key: value for key, value in self._metrics().items() if key in self.before},
            "bytes_full": self._bytes_full(),
            "procs": self.procs,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on counting from a `state_dict()`; lines of metrics.jsonl that came after it go. All
        totals are those of the job: where other islands or ranks go on, they share what the earlier
        ones have counted.
        """
        procs = state.get("procs", self.procs)
        self.start, self.step, self.since = 0, state["step"], state["step"]
        counted = int(self.exchange.totals()["global_tokens"])
        self.earlier = max(state.get("counted", 0) - counted, 0)
        self.tokens = counted + self.earlier
        self.full = state.get("bytes_full", full_bytes(self.parameters, self.since, self.islands))
        self.losses = [torch.tensor(v, device=self.accelerator.device) for v in state["losses"]]
        self.validation, self.before = state["validation"], {**state["before"]}
        self.before["bytes_sent"] *= procs / self.procs
        self.began, self.evaluating = time.monotonic() - state["seconds"], state["evaluating"]
        if self.main and self.step != self.exchange.step:
            self.record.resume(self.step)

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

    def track(self) -> None:
        """Send the lines to the accelerator's trackers, too: one run per island."""
        run = f"{self.output.name}-{self.topology.name}"
        self.accelerator.project_configuration.logging_dir = str(self.folder)
        self.accelerator.init_trackers(
            "fsdp_demo",
            config={k: v for k, v in self.facts.items() if v is not None},
            init_kwargs={
                "wandb": {"name": run, "group": self.output.name},
                "trackio": {"name": run},
                "mlflow": {"run_name": run},
            },
        )
        self.tracks = True

    def micro_batch(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())

    def optimizer_step(self, lr: float) -> None:
        """Once per optimizer step, on every rank."""
        before, self.step = self.step, self.exchange.step  # it may have left some out
        if self.progress is not None:
            self.progress.step(self.step)
            self.record.tick()
        if before // self.log_every == self.step // self.log_every and self.step != self.steps:
            return
        values, energy = self._island(), self.exchange.kept_energy()
        if self.tracks:
            own = {"loss": values["loss"], "lr": lr}
            metrics = own | tracked(self.exchange)
            with spared(self.folder):
                self.accelerator.log(metrics, step=self.step)
        self.losses.clear()
        if not self.main:
            return
        speed = values["tokens"] / self._seconds()
        line = {
            "step": self.step,
            "lr": lr,
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            "bytes_full": self._bytes_full(),
            **values,
            **({"kept_energy": energy} if energy else {}),
            **self.counters(),
        }
        self.record.line(line)
        if self.progress is not None:
            everywhere = values["global_loss"] is not None
            self.progress.update(
                loss=values["global_loss"] if everywhere else values["loss"],
                everywhere=everywhere or self.islands == 1,
                tokens_per_second=speed,
                sent=values["bytes_sent"],
                full=line["bytes_full"],
            )

    def evaluated(self, loss: float, seconds: float) -> None:
        """The loss on the held-out rows, and the seconds that it took."""
        self.evaluating += seconds
        values = self._island()
        self.validation.append([self.step, loss, values["bytes_sent"]])
        if self.main:
            self.record.event(
                "evaluation", loss=loss, tokens=values["tokens"], bytes_sent=values["bytes_sent"]
            )
        if self.progress is not None and self.topology.island == 0:
            self.progress.write(f"step {self.step}: validation loss {loss:.4f}")

    def saved(self) -> None:
        """A checkpoint was written."""
        if self.main:
            self.record.event("checkpoint")

    def finish(self, digests_equal: bool | None) -> dict[str, Any]:
        """Write what there is to write; returns the summary (the same numbers on every rank of an
        island, seconds aside).
        """
        values, metrics = self._island(), self._metrics()
        speed = values["tokens"] / self._seconds()
        totals = {**values, "tokens_per_second": speed, "bytes_full": self._bytes_full()}
        summary = {
            **summarise(self.exchange, totals, time.monotonic() - self.began),
            "procs": self.procs,
            "steps": self.steps,
            "since": self.start,
            "parameters": self.parameters,
            "loss_start": self.validation[0][1],
            "loss_end": self.validation[-1][1],
            "global_loss": values["global_loss"],
            "mfu": self._mfu(speed),
            "peak_memory": values["peak_memory"],
            "exchanges": metrics["exchanges"],
            "digests_equal": digests_equal,
            "validation": self.validation,
            "hidden": hidden(metrics),
            **self.counters(),
            **self.facts,
        }
        if self.progress is not None:
            self.progress.close()
        if self.main:
            summary["bytes"] = ledger_rows(self.exchange)
            self.record.finish(summary)
        if self.main and self.topology.island == 0:
            with spared(self.output / "summary.json"):
                write_json(self.output / "summary.json", summary)
            with spared(Path("the table on stdout")):
                print("\n".join(f"{n:<28}{value}" for n, value in self._rows(summary)), flush=True)
        return summary

    def draw(self) -> None:
        """Once all islands have ended: the report of the run, by the main process of island 0."""
        if self.main and self.topology.island == 0:
            with spared(self.output / "report.html"):
                make([self.output])

    def _seconds(self) -> float:
        return max(time.monotonic() - self.began - self.evaluating, 1e-9)

    def _mfu(self, tokens_per_second: float) -> float | None:
        return None if self.flops is None else tokens_per_second * self.flops

    def _island(self) -> dict[str, Any]:
        """What the ranks of this island, in a mesh of all, count together (a collective).

        Means: loss, waiting, and `global_loss`, which every rank got from its peers with the last
        exchange. Tokens are those of all islands that took part, bytes those of one, memory is that
        of the rank which took most.
        """
        metrics = self._metrics()
        self.tokens = self.earlier + int(self.exchange.totals()["global_tokens"])
        loss = torch.stack(self.losses).float().mean().item() if self.losses else 0.0
        everywhere = math.nan if metrics["loss"] is None else metrics["loss"]
        counts = [
            metrics["bytes_sent"],
            metrics["seconds_waiting"],
            peak_memory(self.accelerator.device),
        ]
        mine = torch.tensor(
            [[loss, everywhere, *counts]],
            dtype=torch.float64,
            device=self.accelerator.device,
        )
        ranks = self.accelerator.gather(mine)
        loss, everywhere, _, waiting, _ = ranks.mean(0).tolist()
        sent = ranks[:, 2].sum().item()
        return {
            "loss": loss,
            "global_loss": None if math.isnan(everywhere) else everywhere,
            "tokens": self.tokens,
            "bytes_sent": round(sent * self.worlds / self.islands),
            "seconds_waiting": waiting,
            "peak_memory": int(ranks[:, 4].max()),
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
        # an island that came back, or has another number of ranks, lacks the first evaluation
        before = f"{summary['loss_start']:.3f} before, " if len(self.validation) > 1 else ""
        rows = [
            [
                "preset",
                f"{summary['preset']}, {_shape(summary)}, {counted(summary['steps'], 'step')}",
            ],
            *([] if whole else [["islands", f"{count} began, {who}"]]),
            *([["counted since step", str(summary["since"])]] if summary["since"] else []),
            ["validation loss", f"{before}{summary['loss_end']:.3f} after"],
            [
                f"training loss, {'all islands' if whole else 'at the end'}",
                "-" if summary["global_loss"] is None else f"{summary['global_loss']:.3f}",
            ],
            [
                "tokens/s, " + ("all islands" if whole else "of those that took part"),
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


def _shape(summary: dict[str, Any]) -> str:
    return f"{counted(summary['islands'], 'island')} x {counted(summary['procs'], 'rank')}"


def hidden(metrics: dict[str, Any]) -> float | None:
    """Share of the seconds of all exchanges in which training went on."""
    exchanging = metrics["seconds_exchanging"]
    return max(0.0, 1.0 - metrics["seconds_waiting"] / exchanging) if exchanging else None
