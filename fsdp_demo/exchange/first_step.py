"""Between attach and the first step: what a loss has cut off is made up for, and parameters must
still be what attach left.

Weights that are loaded after attach would be pulled back: anchors, and what the islands agreed on,
are those of before.
"""

from __future__ import annotations

import logging

import torch

from ..comm.digests import sums
from ..comm.island import IslandGroup
from ..errors import see
from ..hosts.base import TrainingHost
from .frozen import FrozenWatch
from .refusals import refuse_sparse
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")


class FirstStep:
    """What is to be done once, ahead of the first step: `StepRuntime.ahead` until then.

    Attributes:
        joined_at: the step from which this replica goes on with the others; -1 where it has joined
            them later.
        frozen: looks whether frozen parameters stay as they are.
    """

    def __init__(self, runtime: StepRuntime, model: torch.nn.Module | None):
        self._runtime, self._untouched = runtime, Untouched(runtime.host, runtime.island)
        self.frozen = FrozenWatch(runtime, model)
        self._behind = False
        self.joined_at = runtime.step

    def joined(self, later: bool = False) -> None:
        """The islands have come together: all of it is to be done. later: this one has joined the
        others, who were under way.
        """
        self.joined_at, self._behind = -1 if later else self._runtime.step, True
        self._untouched.note()
        self.frozen.note()
        self._runtime.rewritten.forget()
        self._runtime.hooks.aside = False
        self._runtime.ahead = self._run if self._untouched.pending else None

    def _run(self) -> None:
        """Do what is left, again as long as it fails.

        Raises:
            ValueError: parameters were changed since attach; gradients are sparse.
        """
        self.catch_up()
        self.check()
        self._runtime.ahead = self._second if self.frozen.pending else None
        if self._runtime.config.needs_gradients:
            refuse_sparse(self._runtime.host)

    def _second(self) -> None:
        """Ahead of the second step: what a loop does with frozen parameters it has done once."""
        self._runtime.ahead = None
        self.frozen.look()

    def check(self, stepped: bool = True) -> None:
        """Refuse parameters that were changed since attach, but by steps inside `paused()`.

        stepped: this is a step; else the end of an exchange in which there was none.
        """
        if self._runtime.hooks.aside:
            self._untouched.forget()
        self._untouched.check(stepped)

    def accept_parameters(self) -> None:
        """See `Exchange.accept_parameters`."""
        self._runtime.rewritten.forget()
        if self._untouched.pending:
            self._untouched.note()
            self.frozen.note()

    def catch_up(self) -> None:
        """See `Exchange.catch_up`."""
        if self._behind:
            self._behind = False
            self._send_again()
            if self._untouched.pending:
                self._untouched.note()

    def _send_again(self) -> None:
        """Send what was under way once more; make up for the after-step exchange of the last step,
        if it was cut off by a loss.
        """
        runtime = self._runtime
        runtime.queue.send_again()
        late = runtime.after_step
        cut = [c for c in late if runtime.queue.overdue(c, runtime.step)]
        if not cut:
            return
        log.info(
            "%s: the exchange of step %d was cut off: made up for when all islands have come so "
            "far",
            runtime.topology.name,
            runtime.step,
        )
        runtime.step -= 1
        try:
            stages = [
                [c for c in late if bool(c.channel.after) == second] for second in (False, True)
            ]
            runtime.land(stages[0], runtime.step)
            if any(c in stages[0] for c in cut):  # those of the second stage had not left yet
                runtime.send([c for c in stages[1] if c.channel.schedule.due(runtime.step)])
            runtime.land(stages[1], runtime.step)
        finally:
            runtime.step += 1


class Untouched:
    """Remembers a sum of the bits of every local tensor: equal values give equal sums, whoever
    wrote them.

    Args:
        host: of the parameters. island: the ranks that look together.

    Attributes:
        pending: there is something to compare with.
    """

    def __init__(self, host: TrainingHost, island: IslandGroup):
        self._host, self._island = host, island
        self._sums: list[int] | None = None

    @property
    def pending(self) -> bool:
        """See `Untouched`."""
        return self._sums is not None

    def note(self) -> None:
        """The parameters as they are now are right. One pass over them, one read from the
        device.
        """
        self._sums = self._now() if self._host.device.type != "meta" else None

    def forget(self) -> None:
        """Compare with nothing."""
        self._sums = None

    def check(self, stepped: bool) -> None:
        """Compare once; all ranks of the island call it together. stepped: as for `FirstStep`.

        Raises:
            ValueError: on all of them, if parameters are others than those noted.
        """
        if self._sums is None:
            return
        other = [
            s.name
            for s, now, then in zip(self._host.params, self._now(), self._sums, strict=True)
            if now != then
        ]
        if self._island.any(bool(other)):
            what = (
                f"{', '.join(other[:3])}{' ...' if len(other) > 3 else ''}"
                if other
                else "those of another rank"
            )
            other_steps = (
                ""
                if stepped
                else ". step() of the attached optimizer was not called once: if the loop steps "
                "another one, attach that (optimizer.base_optimizer of SAM and its kin)"
            )
            raise ValueError(
                f"parameters were changed since attach ({what}): the exchange would pull them "
                "back. Load first, then attach, or "
                "attach(state=...) to go on with a saved run; detach() and attach again helps "
                f"now{see('changed-since-attach')}{other_steps}"
            )
        self._sums = None

    def _now(self) -> list[int]:
        """The sums, read from the device in one go."""
        return sums(self._host.tensors("parameter"), self._host.device)
