"""The run log of a training under the Trainer, for `fsdp-demo report`, and its line of progress.
One process writes for an island, in a mesh for all.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import ProgressCallback

from ...exchange.exchange import Exchange
from ...exchange.message import mean_rate
from ...peers.header import ring_all_reduce_bytes
from ...runlog.progress import Progress, ProgressLine, line
from ...runlog.record import RunRecord, ledger_rows, summarise

log = logging.getLogger("fsdp_demo")


class TrainerRecord:
    """The run log of one training.

    Args:
        trainer, exchange: at the beginning of the training, when both stand at one step.
        counted: its `global_tokens` then; 0 where its state begins anew.

    The Trainer's own bar, where it is shown, gets the line as its postfix; else the line is written
    as long as information is logged.
    """

    def __init__(self, trainer: Trainer, exchange: Exchange, counted: int):
        self._exchange, self._trainer = exchange, trainer
        topology, args, state = exchange.topology, trainer.args, trainer.state
        model: Any = trainer.model
        counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
        self._parameters = sum(count for count, _ in counts)
        self._trained = sum(count for count, trained in counts if trained)
        # a plain torch module has no config, or one of its own kind
        config = getattr(model, "config", None)
        name = getattr(config, "name_or_path", "") or type(model).__name__
        facts = {
            "model": Path(name).name if Path(name).is_absolute() else name,
            "batch_size": args.per_device_train_batch_size,
            "accumulation": args.gradient_accumulation_steps,
            "lr": args.learning_rate,
            "seed": args.seed,
        } | ({"mesh": True} if topology.one_world else {})
        self._record = RunRecord(
            Path(str(args.output_dir)),
            exchange,
            steps=state.max_steps,
            parameters=self._parameters,
            procs=topology.world,
            facts=facts,
        )
        self._last = dict(self._record.last)
        self._before = dict(self._record.last)
        self._before["tokens"] = max(self._before.get("tokens", 0) - counted, 0)
        handler: Any = trainer.callback_handler
        self._bar = next((c for c in handler.callbacks if isinstance(c, ProgressCallback)), None)
        self._line: ProgressLine | None = None
        if self._bar is None and log.isEnabledFor(logging.INFO):
            self._line = ProgressLine(exchange, state.max_steps)

    def step(self) -> None:
        """Note an optimizer step, after it."""
        self._record.tick()
        if self._line is not None:
            self._line.step(self._exchange.step)

    def line(self, loss: float, numbers: dict[str, float]) -> None:
        """Write a line of metrics and show the progress.

        Args:
            loss: as the Trainer logs it.
            numbers: metrics of the exchange at this step (`runlog.tracked`).
        """
        values, step = self._values(numbers), self._exchange.step
        everywhere = numbers.get("exchange/loss")
        self._last = {"step": step, "loss": loss, "global_loss": everywhere, **values}
        self._record.line({"lr": float(mean_rate(self._exchange.host)), **self._last})
        known = Progress(
            step,
            self._trainer.state.max_steps,
            loss if everywhere is None else everywhere,
            everywhere is not None,
            values["tokens_per_second"],
            values["bytes_sent"],
            values["bytes_full"],
        )
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
        """Note an evaluation, whose `eval_loss` the Trainer has logged."""
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

    def close(self) -> None:
        """End the line of progress."""
        if self._line is not None:
            self._line.close()
            self._line = None
