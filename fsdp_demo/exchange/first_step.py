"""Between attach and the first step: what a loss has cut off is made up for, and parameters must
still be what attach left.

Weights that are loaded after attach would be pulled back: anchors, and what the islands agreed on,
are those of before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ..config.channel import matches
from ..errors import counted, see
from ..hosts.base import TrainingHost, plain_name
from ..rendezvous.island import IslandGroup
from .refusals import refuse_sparse
from .runtime import StepRuntime
from .watch import sums

# What no optimizer of an island steps: frozen parameters and buffers that islands share, and a
# look whether frozen parameters stay as they were made equal at `attach`.
#
# A script may move them by hand: the teacher of a student, a target network. Nothing is exchanged
# of them then, so each island ends with its own.

log = logging.getLogger("fsdp_demo")


def shared_tensors(
    host: TrainingHost, model: torch.nn.Module, own: Sequence[str]
) -> dict[str, Tensor]:
    """Frozen parameters and buffers, by name, but those that are each island's own by a pattern."""
    return {
        name: t
        for name, t in host.untrained_tensors(model).items()
        if t.numel() and not matches(name, own)
    }


def refuse_unknown(host: TrainingHost, model: torch.nn.Module | None, own: Sequence[str]) -> None:
    """Raise ValueError for a pattern of `own_tensors` that fits nothing which could be an island's
    own.
    """
    if not own:
        return
    if model is None:
        raise ValueError(f"own_tensors={list(own)} needs the model: pass model= to attach")
    known = list(host.untrained_tensors(model))
    for pattern in own:
        if not any(matches(name, [pattern]) for name in known):
            there = ", ".join(known[:6]) + " ..." * (len(known) > 6)
            raise ValueError(
                f"own_tensors: {pattern!r} fits no buffer and no frozen parameter of the model "
                f"(there are: {there or 'none'}); a trained parameter cannot be an island's own"
            )


class FrozenWatch:
    """Remembers a sum of the bits of every frozen parameter that islands share.

    Args:
        runtime: of this rank. model: that has them; None: nothing is looked at.

    Attributes:
        pending: there is something to compare with.
    """

    def __init__(self, runtime: StepRuntime, model: torch.nn.Module | None):
        self._runtime = runtime
        self._model = model if runtime.topology.islands > 1 else None
        self._sums: dict[str, int] = {}

    @property
    def pending(self) -> bool:
        """See `FrozenWatch`."""
        return bool(self._sums)

    def note(self) -> None:
        """They are right as they are now. One pass over them, one read from the device."""
        self._sums = self._now()

    def look(self) -> None:
        """Compare, and warn once of those that are others; all ranks of the island call it."""
        if not self.pending:
            return
        now = self._now()
        moved = [name for name, then in self._sums.items() if now.get(name, then) != then]
        if not self._runtime.island.any(bool(moved)):
            return
        self._sums = {}
        if self._runtime.topology.rank == 0:
            log.warning(
                "%s: frozen parameters were moved since attach (%s%s). Nothing keeps those equal, "
                "so each island ends with its own. Make buffers of them, which are averaged; or "
                'say attach(..., own_tensors=["NAME*"]) where that is meant%s',
                self._runtime.topology.name,
                ", ".join(moved[:3]) or "those of another rank",
                f" ..., {counted(len(moved), 'tensor')}" if len(moved) > 3 else "",
                see("frozen-moved"),
            )

    def _now(self) -> dict[str, int]:
        if self._model is None:
            return {}
        host, own = self._runtime.host, self._runtime.config.own_tensors
        frozen = {plain_name(n) for n, p in self._model.named_parameters() if not p.requires_grad}
        tensors = {n: t for n, t in shared_tensors(host, self._model, own).items() if n in frozen}
        return dict(zip(tensors, sums(list(tensors.values()), host.device), strict=True))


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
