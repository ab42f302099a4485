"""Evaluation under the Trainer: which parameters it shows, and metrics that all islands agree
on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from transformers import Trainer
from transformers.trainer_utils import has_length

from ...config.local_steps import round_of
from ...exchange.exchange import Exchange
from ...hosts.torch_params import reshard

log = logging.getLogger("fsdp_demo")


class Evaluations:
    """Runs evaluation loops while an exchange is alive.

    They show `Exchange.outer_parameters`. Where these are a mean that costs a round of
    communication, only evaluations at steps at which all islands evaluate can show them; any other
    shows this island's own parameters, and says so.

    With `load_best_model_at_end`, or a schedule of the learning rate that follows a metric, metrics
    are averaged over the islands, so that all of them keep the same checkpoint and the same rate.

    Attributes:
        agreed: metrics are averaged.
        plan: when this island evaluates, and whether all do so together, for islands that join
            later.

    Raises:
        ValueError: `load_best_model_at_end` where checkpoints do not hold what is evaluated; an
            island that joins others which evaluate together, at other steps.
    """

    def __init__(self, exchange: Exchange, trainer: Trainer):
        self._exchange, self._trainer = exchange, trainer
        args: Any = trainer.args
        state: Any = trainer.state
        self.agreed = _decides(trainer)
        loader: Any = trainer.callback_handler.train_dataloader
        batches = len(loader) if has_length(loader) else 0
        epoch = math.ceil(batches / args.gradient_accumulation_steps)
        every = {"steps": int(state.eval_steps or 0), "epoch": epoch}
        self._every = every.get(str(args.eval_strategy.value), 0)
        self._from, config = args.eval_delay, exchange.config
        self._within = round_of(config.channels) if config.by_speed else 1
        names = sorted(trainer.eval_dataset) if isinstance(trainer.eval_dataset, dict) else []
        if args.load_best_model_at_end:
            period = self._every or 1
            if period % self._within:
                raise ValueError(
                    f"load_best_model_at_end with eval_steps={period} beside "
                    f"local_steps='by_speed' with a period of {self._within}: set eval_steps to a "
                    "multiple of it, where all islands stand at one step"
                )
            first = max(period, -(-int(self._from) // period) * period)
            check_best(exchange, range(first, state.max_steps, period))
        plan = [str(args.eval_strategy), self._every, self._from, bool(args.eval_on_start), names]
        self._together = self._same(plan) if exchange.result_kind == "mean" or self.agreed else True
        self.plan = [plan, self._together]
        # the others evaluate there before this island is with them
        self._joined = exchange.step if exchange.newcomer else -1
        if not self._together:
            log.warning(
                "islands evaluate at different steps (here: %s): evaluation shows each island's "
                "own parameters",
                plan[:3],
            )
        # evaluations that all islands have run: one more is a user's own
        self._done: set[tuple[int, str]] = set()

    def _same(self, plan: list[Any]) -> bool:
        """Whether all islands evaluate at the same steps; a newcomer was told by its donor."""
        if not self._exchange.newcomer:
            return self._exchange.across_islands.all_equal(plan)
        theirs, together = self._exchange.told.get("evaluations") or [None, False]
        if together and theirs != plan:
            raise ValueError(
                f"the other islands evaluate together by {theirs}, this one by {plan}: give it "
                "their arguments"
            )
        return bool(together)

    @staticmethod
    def facts(trainer: Trainer) -> dict[str, Any]:
        """Settings that must be equal on all islands where a metric decides; none otherwise."""
        args, state = trainer.args, trainer.state
        if not _decides(trainer):
            return {}
        same = ("eval_strategy", "eval_delay", "save_strategy", "metric_for_best_model")
        facts = {name: str(getattr(args, name)) for name in (*same, "greater_is_better")}
        return {"eval_steps": state.eval_steps, "save_steps": state.save_steps, **facts}

    def _due(self) -> bool:
        """Whether every island evaluates at this step."""
        state = self._trainer.state
        if not self._together or not self._trainer.is_in_train or state.global_step == self._joined:
            return False
        # the model all replicas end with
        if self._exchange.finished or state.global_step >= state.max_steps:
            return True
        if state.global_step == 0:
            return bool(self._trainer.args.eval_on_start)
        now = state.epoch if self._trainer.args.eval_strategy == "epoch" else state.global_step
        passed = state.global_step - self._within  # islands of unlike speed meet once in a round
        due = bool(self._every) and passed // self._every < state.global_step // self._every
        return due and now >= self._from

    def run(self, loop: Callable[[], Any], prefix: str) -> Any:
        """Run an evaluation loop; returns its output with `<prefix>_outer_parameters` (1 or 0) in
        the metrics.
        """
        ended, model = self._exchange.finished, self._trainer.model
        due, now = self._due(), (self._trainer.state.global_step, prefix)
        if due:
            due = now not in self._done
            self._done.add(now)
        outer = ended or self._exchange.result_kind != "mean" or due
        assert model is not None
        try:
            with self._exchange.outer_parameters(model) if outer else nullcontext():
                output = loop()
        finally:
            reshard(model)  # the parameters may change before the next forward
        if output.metrics is None:
            return output
        if self.agreed and due and not self._exchange.closed:
            own = {
                k: v
                for k, v in sorted(output.metrics.items())
                if isinstance(v, (int, float)) and not k.endswith("_time")
            }
            means = self._exchange.across_islands.mean(list(own.values()))
            output.metrics.update(zip(own, means, strict=True))
        output.metrics[f"{prefix}_outer_parameters"] = float(outer)
        return output


def check_best(exchange: Exchange, steps: range) -> None:
    """Refuse `load_best_model_at_end` where checkpoints do not hold what was evaluated.

    Args:
        steps: the job's steps (counted from 1) after which the Trainer evaluates.

    Raises:
        ValueError: at one of these steps replicas hold parameters of their own; says what to set.
    """
    for channel in (c.channel for c in exchange.channels if c.channel.writes_parameters):
        schedule = channel.schedule
        equal = channel.equal_after_exchange and schedule.pure and not schedule.delay
        equal &= not exchange.config.backup_islands  # a late island keeps what it has trained
        wrong = [s for s in steps if not (equal and schedule.due(s - 1))]
        if wrong:
            cure = "set load_best_model_at_end=False"
            if equal and not schedule.offset:
                period = schedule.sync_every
                cure = f"make eval_steps and save_steps multiples of its period ({period})"
            raise ValueError(
                f"load_best_model_at_end: after step {wrong[0]} a checkpoint holds this island's "
                "own parameters, evaluation shows the "
                f"{exchange.result_kind} of channel {channel.name!r}: {cure}"
            )


def _decides(trainer: Trainer) -> bool:
    """Whether a metric decides about the model: the best checkpoint, or the learning rate."""
    by_metric = type(trainer.lr_scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR")
    return bool(trainer.args.load_best_model_at_end) or by_metric
