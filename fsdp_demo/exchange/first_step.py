"""The work of an exchange between `attach` and the first step: an exchange that a loss has cut off
is made up for, and weights that were loaded after `attach` are refused. The anchors are those of
before, so the exchange would pull such weights back. The same for `load_state_dict` in mid-run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..config.channel import matches
from ..elastic.agreement import gather_json
from ..errors import counted, first_few, see
from ..hosts.base import TrainingHost, named_buffers, plain_name, plain_parts
from ..peers.header import DIGESTS
from .refusals import refuse_sparse
from .rewritten import sums
from .runtime import StepRuntime

log = logging.getLogger("fsdp_demo")

Named = Iterable[tuple[str, Tensor | None]]
"""Tensors with their names, of which one may stand there several times."""


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


class Noted:
    """Checksums of some tensors, noted to find out later which of them were written.

    Args:
        read: gives the tensors as they are now, each with its name. device: of these tensors.

    Attributes:
        sums: of their bits, by name; None where there is nothing to compare with.
    """

    def __init__(self, read: Callable[[], Named], device: torch.device):
        self._read, self._device = read, device
        self.sums: dict[str, int] | None = None

    def note(self) -> None:
        """Take the checksums now: one pass over the tensors, one read from the device."""
        self.sums = self._now() if self._device.type != "meta" else None

    def moved(self) -> list[str]:
        """The names of the tensors whose checksums have changed since `note`."""
        now, then = self._now(), self.sums or {}
        return [name for name in then if now.get(name, then[name]) != then[name]]

    def _now(self) -> dict[str, int]:
        pairs, found = list(self._read()), dict[str, int]()
        values = sums([t for _, t in pairs], self._device)
        for (name, _), value in zip(pairs, values, strict=True):
            found[name] = found.get(name, 0) + value  # of several shards, under ZeRO
        return found


class LoadHook:
    """A hook that calls `note`; in a copy of the model it does nothing."""

    def __init__(self, note: Callable[[], None]):
        self._note = note

    def __call__(self, *args: Any) -> None:
        self._note()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class FirstStep:
    """The work that an exchange does once, ahead of the first step (`StepPhases.before_step`), and
    ahead of each step after a load of the model or an optimizer.

    Args:
        runtime: of this rank.
        undone: whether what is loaded now will be undone (`Exchange.outer_parameters`).
        model: with frozen parameters to watch. `attach` made them equal; a script that moves them
            by hand (the teacher of a student, a target network) ends with others on each island,
            since they are not exchanged. None: they are not watched.

    Attributes:
        next: the work ahead of the coming step; None: there is none.
        joined_at: the step from which this replica goes on with the others; -1 where it has joined
            a run under way.
    """

    def __init__(
        self, runtime: StepRuntime, model: torch.nn.Module | None, undone: Callable[[], bool]
    ):
        self._runtime, self._undone = runtime, undone
        self._model = model if runtime.topology.islands > 1 else None
        self._parameters = Noted(self._held, runtime.host.device)
        self._frozen = Noted(self._frozen_parameters, runtime.host.device)
        self._registered = self._buffers().keys()
        self._behind = False
        self.next: Callable[[], None] | None = None
        self.joined_at = runtime.step
        self._loaded, self._accepted_at = False, -1
        hook, modules = LoadHook(self._note_load), [] if model is None else model.modules()
        watched: list[Any] = [*modules, *runtime.host.optimizers]
        self._handles = [each.register_load_state_dict_pre_hook(hook) for each in watched]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def pause(self) -> None:
        """Do nothing ahead of a step until `joined`: those of another island are repeated."""
        self.next = None

    def go_on_from(self, step: int) -> None:
        """Note the step to which all islands were taken back (`joined_at`)."""
        self.joined_at = step

    def joined(self, later: bool = False) -> None:
        """Begin the watch. later: this island has joined the others, who were under way."""
        self.joined_at, self._behind = -1 if later else self._runtime.step, True
        self._loaded = False
        self._parameters.note()
        self._frozen.note()
        self._runtime.rewritten.forget()
        self._runtime.hooks.aside = False
        self.next = self._run if self._parameters.sums is not None else None

    def _run(self) -> None:
        """Ahead of the first step, and of one after a load; called again as long as it raises."""
        self.catch_up()
        self.check()
        # a loop that moves frozen parameters has done so once ahead of its second step
        self.next = self.look_at_frozen if self._frozen.sums else None
        if self._runtime.config.needs_gradients:
            refuse_sparse(self._runtime.host)

    def check(self, stepped: bool = True) -> None:
        """Raise ValueError on all ranks for values that were changed since attach, or by a load,
        but by steps inside `paused()`. All ranks of the island call it together. stepped: ahead of
        a step; else at the end of an exchange in which there was none.
        """
        noted, done = self._parameters, self._loaded and not stepped
        looks = not (self._runtime.hooks.aside or noted.sums is None or done)
        if looks and self._loaded:
            self._runtime.host.check_loaded()
        moved = noted.moved() if looks else []
        if looks and self._runtime.island.any(bool(moved)):
            what = first_few(moved, 3) or "those of another rank"
            if self._loaded:
                raise ValueError(
                    f"load_state_dict was called after step {self._runtime.step} of a run under "
                    f"way ({what} changed): the exchange knows the old values, and would bring "
                    "them back. Load its state of the same step, too (exchange.load_state_dict), "
                    "or call exchange.reset(parameters), before the next step; detach() and attach "
                    f"again helps now{see('loaded-midway')}"
                )
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
        self._loaded, noted.sums = False, None

    def look_at_frozen(self) -> None:
        """Warn once of frozen parameters moved since attach; all ranks of the island together."""
        runtime = self._runtime
        self.next = None
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

    def unlike_buffers(self) -> list[str]:
        """The names of buffers that were registered since attach, which no exchange averages, and
        are not the same on all islands; warns of them. All ranks of all islands call it together.
        """
        runtime, now = self._runtime, self._buffers()
        if runtime.topology.islands == 1:
            return []
        values = sums(list(now.values()), runtime.host.device)
        mine = {n: [v, n not in self._registered] for n, v in zip(now, values, strict=True)}
        everyone = runtime.queue.ask(lambda peers: gather_json(peers, mine, DIGESTS, runtime.step))
        everyone = everyone or [mine]
        later = {name for theirs in everyone for name, (_, is_new) in theirs.items() if is_new}
        odd = [n for n in later if len({theirs.get(n, [None])[0] for theirs in everyone}) > 1]
        found = sorted({n for theirs in runtime.island.everyone(odd) for n in theirs})
        if found and runtime.topology.rank == 0:
            text = (
                "%s: buffers that were registered after attach differ between islands: %s. No "
                "exchange averages them: register them before attach, or make them of what all "
                "islands share"
            )
            log.warning(text, runtime.topology.name, first_few(found, 3))
        return found

    def _buffers(self) -> dict[str, Tensor]:
        if self._model is None:
            return {}
        shared = shared_tensors(self._runtime.host, self._model, self._runtime.config.own_tensors)
        return {name: t for name, t in shared.items() if name in named_buffers(self._model)}

    def _held(self) -> Named:
        host = self._runtime.host
        names = [s.name for s in host.params]
        yield from zip(names, host.tensors("parameter"), strict=True)
        for state in host.states() if self._loaded else ():
            for name, t in zip(names, host.tensors(f"state:{state}"), strict=True):
                for part in [] if t is None else plain_parts(t).values():
                    yield f"{state} of {name}", part

    def _frozen_parameters(self) -> Named:
        if self._model is None:
            return []
        shared = shared_tensors(self._runtime.host, self._model, self._runtime.config.own_tensors)
        frozen = {plain_name(n) for n, p in self._model.named_parameters() if not p.requires_grad}
        return [(name, t) for name, t in shared.items() if name in frozen]

    def accept_parameters(self, loads: bool = True) -> None:
        """Note the parameters as they are now; loads: and as they are ahead of the next step."""
        self._runtime.rewritten.forget()
        self._accepted_at = self._runtime.step if loads else -1
        if self._loaded:
            self._loaded, self._parameters.sums = False, None
        if self._parameters.sums is not None:
            self._parameters.note()
            self._frozen.note()

    @torch.no_grad()
    def _note_load(self) -> None:
        """Ahead of a load: note the values, unless they are noted or no state goes with them."""
        runtime = self._runtime
        kept = any(c.channel.source == "delta" or c.channel.accumulator for c in runtime.channels)
        accepted = self._accepted_at == runtime.step or self._undone() or runtime.finished
        if kept and self._parameters.sums is None and not accepted:
            self._loaded, self.next = True, self._run
            self._parameters.note()

    def catch_up(self) -> None:
        """As `Exchange.catch_up`."""
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
        runtime.go_to(runtime.step - 1)
        try:
            stages = [
                [c for c in late if bool(c.channel.after) == second] for second in (False, True)
            ]
            runtime.land(stages[0], runtime.step)
            if any(c in stages[0] for c in cut):  # messages of the second stage had not left yet
                runtime.send([c for c in stages[1] if c.channel.schedule.due(runtime.step)])
            runtime.land(stages[1], runtime.step)
        finally:
            runtime.go_to(runtime.step + 1)
