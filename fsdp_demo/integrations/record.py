"""The run log of a training under a Trainer, for `fsdp-demo report`, and its line of progress. One
process writes for an island, in a mesh for all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..exchange.exchange import Exchange
from ..exchange.message import mean_rate
from ..peers.header import ring_all_reduce_bytes
from ..runlog.progress import Progress, ProgressLine, line
from ..runlog.record import RunRecord, ledger_rows, summarise

log = logging.getLogger("fsdp_demo")


class TrainingRecord:
    """The run log of one training.

    Args:
        exchange: at the beginning of the training.
        folder: output folder of the island.
        model: what trains, sharded or not.
        steps: of the job; None: nobody knows.
        facts: of the run, as for `RunRecord`.
        counted: the exchange's `global_tokens` then; 0 where its state begins anew.
        bar: a callback that shows the training; its `training_bar` gets the line as its postfix, if
            it has one. None: the line is written as long as information is logged.
    """

    def __init__(
        self,
        exchange: Exchange,
        folder: str,
        model: Any,
        *,
        steps: int | None,
        facts: dict[str, Any],
        counted: int,
        bar: Any = None,
    ):
        self._exchange, self._steps, self._bar = exchange, steps, bar
        counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
        self._parameters = sum(count for count, _ in counts)
        self._trained = sum(count for count, trained in counts if trained)
        known = {"steps": steps, "parameters": self._parameters, "procs": exchange.topology.world}
        self._record = RunRecord(Path(folder), exchange, facts=facts, **known)
        self._last = dict(self._record.last)
        self._before = dict(self._record.last)
        self._before["tokens"] = max(self._before.get("tokens", 0) - counted, 0)
        self._line: ProgressLine | None = None
        if bar is None and log.isEnabledFor(logging.INFO):
            self._line = ProgressLine(exchange, steps)

    def step(self) -> None:
        """Note an optimizer step, after it."""
        self._record.tick()
        if self._line is not None:
            self._line.step(self._exchange.step)

    def line(self, loss: float, numbers: dict[str, float]) -> None:
        """Write a line of metrics and show the progress.

        Args:
            loss: mean over the ranks of the island and the steps since the line before.
            numbers: metrics of the exchange at this step (`runlog.tracked`).
        """
        values, step = self._values(numbers), self._exchange.step
        everywhere = numbers.get("exchange/loss")
        self._last = {"step": step, "loss": loss, "global_loss": everywhere, **values}
        self._record.line({"lr": float(mean_rate(self._exchange.host)), **self._last})
        counts = [values[name] for name in ("tokens_per_second", "bytes_sent", "bytes_full")]
        mean = loss if everywhere is None else everywhere
        known = Progress(step, self._steps, mean, everywhere is not None, *counts)
        if self._line is not None:
            self._line.update(**vars(known))
        elif (bar := getattr(self._bar, "training_bar", None)) is not None:
            text = line(known, self._exchange.activity.text).partition(", ")[2]
            bar.set_postfix_str(text, refresh=False)

    def _values(self, numbers: dict[str, float]) -> dict[str, Any]:
        """Totals of the whole job: the last line of earlier starts has what these have counted."""

        def whole(name: str, here: str = "") -> float:
            return self._before.get(name, 0) + numbers.get(f"exchange/{here or name}", 0)

        tokens = whole("tokens", "global_tokens")
        step = ring_all_reduce_bytes(self._exchange.topology.count, 2 * self._trained)
        return {
            "tokens": int(tokens),
            "tokens_per_second": tokens / max(self._record.seconds, 1e-9),
            "bytes_sent": int(whole("bytes_sent")),
            "bytes_full": step * self._exchange.step,
            "seconds_waiting": whole("seconds_waiting"),
        }

    def evaluated(self, loss: float) -> None:
        """Note an evaluation and its loss."""
        last = {name: self._last.get(name) for name in ("tokens", "bytes_sent")}
        self._record.event("evaluation", loss=loss, **last)

    def saved(self) -> None:
        """Note a checkpoint that was written."""
        self._record.event("checkpoint")

    def end(self, numbers: dict[str, float]) -> None:
        """Write the summary of a training whose exchange is finished."""
        exchange = self._exchange
        self._record.finish(
            {
                **summarise(exchange, self._values(numbers), self._record.seconds),
                "procs": exchange.topology.world,
                "steps": exchange.step,
                "parameters": self._parameters,
                "digests_equal": exchange.digests_equal(),
                "bytes": ledger_rows(exchange),
            }
        )
        self.close()

    def close(self) -> None:
        """End the line of progress, and write the exchanges of which no line of metrics has told:
        a stop lies between two of them.
        """
        self._record.exchanges()
        if self._line is not None:
            self._line.close()
            self._line = None


def of_trainer(trainer: Any, exchange: Exchange, counted: int) -> TrainingRecord:
    """The record of a training of transformers' Trainer; `counted` as for `TrainingRecord`."""
    from transformers.trainer_callback import ProgressCallback

    args, model, handler = trainer.args, trainer.model, trainer.callback_handler
    # a plain torch module has no config, or one of its own kind
    name = getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__
    facts = {
        "model": Path(name).name if Path(name).is_absolute() else name,
        "batch_size": args.per_device_train_batch_size,
        "accumulation": args.gradient_accumulation_steps,
        "lr": args.learning_rate,
        "seed": args.seed,
    } | ({"mesh": True} if exchange.topology.one_world else {})
    bar = next((c for c in handler.callbacks if isinstance(c, ProgressCallback)), None)
    how = {"steps": trainer.state.max_steps, "facts": facts, "counted": counted, "bar": bar}
    return TrainingRecord(exchange, str(args.output_dir), model, **how)
