"""The work of an exchange between `attach` and the first step: an exchange that a loss has cut off
is made up for, and weights that were loaded after `attach` are refused. The anchors are those of
before, so the exchange would pull such weights back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..config.channel import matches
from ..errors import counted, first_few, see
from ..hosts.base import TrainingHost, plain_name
from .refusals import refuse_sparse
from .runtime import StepRuntime
from .watch import sums

log = logging.getLogger("fsdp_demo")


def shared_tensors(
    host: TrainingHost, model: torch.nn.Module, own: Sequence[str]
) -> dict[str, Tensor]:
    """Frozen parameters and buffers by name, without those that fit a pattern of `own`."""
    return {
        name: t
        for name, t in host.untrained_tensors(model).items()
        if t.numel() and not matches(name, own)
    }


def bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """The values of tensors one after the other, uint8 [n] on the CPU."""
    parts = [t.contiguous().view(-1).view(torch.uint8).cpu() for t in tensors]
    return torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *parts])


def write_bytes(work: Tensor, tensors: Sequence[Tensor]) -> None:
    """The inverse of `bytes_of`: write `work` into tensors, in place."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    for t, part in zip(tensors, work.split(sizes), strict=True):
        t.copy_(part.clone().view(t.dtype).view(t.shape))


def refuse_unknown(host: TrainingHost, model: torch.nn.Module | None, own: Sequence[str]) -> None:
    """Raise ValueError for a pattern of `own_tensors` that fits no buffer or frozen parameter."""
    if not own:
        return
    if model is None:
        raise ValueError(f"own_tensors={list(own)} needs the model: pass model= to attach")
    known = list(host.untrained_tensors(model))
    for pattern in own:
        if not any(matches(name, [pattern]) for name in known):
            raise ValueError(
                f"own_tensors: {pattern!r} fits no buffer and no frozen parameter of the model "
                f"(there are: {first_few(known, 6) or 'none'}); a trained parameter cannot be "
                "an island's own"
            )


def named_tensors(host: TrainingHost, source: str) -> Iterable[tuple[str, Tensor | None]]:
    """Local tensors of a source, as `TrainingHost.tensors`, each with its parameter's name."""
    return zip((s.name for s in host.params), host.tensors(source), strict=True)


class Noted:
    """Checksums of some tensors, noted to find out later which of them were written.

    Args:
        read: gives the tensors as they are now, each with its name. device: of these tensors.

    Attributes:
        sums: of their bits, by name; None where there is nothing to compare with.
    """

    def __init__(self, read: Callable[[], Iterable[tuple[str, Tensor | None]]], device: torch.device):
        self._read, self._device = read, device
        self.sums: dict[str, int] | None = None

    def note(self) -> None:
        """Take the sums now: one pass over the tensors, one read from the device."""
        self.sums = self._now() if self._device.type != "meta" else None

    def moved(self) -> list[str]:
        """The names of the tensors whose values are others now."""
        now, then = self._now(), self.sums or {}
        return [name for name in then if now.get(name, then[name]) != then[name]]

    def _now(self) -> dict[str, int]:
        names, tensors = zip(*pairs, strict=True) if (pairs := list(self._read())) else ((), ())
        found = dict.fromkeys(names, 0)
        for name, value in zip(names, sums(tensors, self._device), strict=True):
            found[name] += value  # a parameter may lie here in several shards of its name
        return found


class FirstStep:
    """The work that an exchange does once, ahead of the first step (`StepRuntime.ahead`).

    Args:
        runtime: of this rank.
        model: with frozen parameters to watch. `attach` made them equal; a script that moves them
            by hand (the teacher of a student, a target network) ends with others on each island,
            since they are not exchanged. None: they are not watched.

    Attributes:
        joined_at: the step from which this replica goes on with the others; -1 where it has joined
            a run under way.
    """

    def __init__(self, runtime: StepRuntime, model: torch.nn.Module | None):
        self._runtime = runtime
        self._model = model if runtime.topology.islands > 1 else None
        self._parameters = Noted(self._named_parameters, runtime.host.device)
        self._frozen = Noted(self._frozen_parameters, runtime.host.device)
        self._behind = False
        self.joined_at = runtime.step

    def joined(self, later: bool = False) -> None:
        """Begin the watch. later: this island has joined the others, who were under way."""
        self.joined_at, self._behind = -1 if later else self._runtime.step, True
        self._parameters.note()
        self._frozen.note()
        self._runtime.rewritten.forget()
        self._runtime.hooks.aside = False
        self._runtime.ahead = self._run if self._parameters.sums is not None else None

    def _run(self) -> None:
        """Ahead of the first step; called again as long as it raises."""
        self.catch_up()
        self.check()
        # a loop that moves frozen parameters has done so once ahead of its second step
        self._runtime.ahead = self.look_at_frozen if self._frozen.sums else None
        if self._runtime.config.needs_gradients:
            refuse_sparse(self._runtime.host)

    def check(self, stepped: bool = True) -> None:
        """Raise ValueError on all ranks for parameters that were changed since attach, but by steps
        inside `paused()`. All ranks of the island call it together. stepped: ahead of a step; else
        at the end of an exchange in which there was none.
        """
        noted = self._parameters
        if self._runtime.hooks.aside or noted.sums is None:
            noted.sums = None
            return
        moved = noted.moved()
        if self._runtime.island.any(bool(moved)):
            what = first_few(moved, 3) or "those of another rank"
            text = (
                f"parameters were changed since attach ({what}): the exchange would pull them "
                "back. Load first, then attach, or attach(state=...) to go on with a saved run; "
                f"detach() and attach again helps now{see('changed-since-attach')}"
            )
            if not stepped:
                text += (
                    ". step() of the attached optimizer was not called once: if the loop steps "
                    "another one, attach that (optimizer.base_optimizer of SAM and its kin)"
                )
            raise ValueError(text)
        noted.sums = None

    def look_at_frozen(self) -> None:
        """Warn once of frozen parameters that were moved since attach. All ranks of the island call
        it together.
        """
        runtime = self._runtime
        runtime.ahead = None
        moved = self._frozen.moved() if self._frozen.sums else []
        if not self._frozen.sums or not runtime.island.any(bool(moved)):
            return
        self._frozen.sums = None
        if runtime.topology.rank == 0:
            log.warning(
                "%s: frozen parameters were moved since attach (%s%s). Nothing keeps those equal, "
                "so each island ends with its own. Make buffers of them, which are averaged; or "
                'say attach(..., own_tensors=["NAME*"]) where that is meant%s',
                runtime.topology.name,
                ", ".join(moved[:3]) or "those of another rank",
                f" ..., {counted(len(moved), 'tensor')}" if len(moved) > 3 else "",
                see("frozen-moved"),
            )

    def _named_parameters(self) -> Iterable[tuple[str, Tensor | None]]:
        return named_tensors(self._runtime.host, "parameter")

    def _frozen_parameters(self) -> Iterable[tuple[str, Tensor | None]]:
        if self._model is None:
            return []
        shared = shared_tensors(self._runtime.host, self._model, self._runtime.config.own_tensors)
        frozen = {plain_name(n) for n, p in self._model.named_parameters() if not p.requires_grad}
        return [(name, t) for name, t in shared.items() if name in frozen]

    def accept_parameters(self) -> None:
        """Note the parameters as they are now (`Exchange.accept_parameters`)."""
        self._runtime.rewritten.forget()
        if self._parameters.sums is not None:
            self._parameters.note()
            self._frozen.note()

    def catch_up(self) -> None:
        """Send messages under way once more, and make up for a lost exchange (`Exchange.catch_up`);
        nothing when called again."""
        if self._behind:
            self._behind = False
            self._send_again()
            if self._parameters.sums is not None:
                self._parameters.note()

    def _send_again(self) -> None:
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
            if any(c in stages[0] for c in cut):  # messages of the second stage had not left yet
                runtime.send([c for c in stages[1] if c.channel.schedule.due(runtime.step)])
            runtime.land(stages[1], runtime.step)
        finally:
            runtime.step += 1
