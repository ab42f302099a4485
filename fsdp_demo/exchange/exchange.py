"""`Exchange`, the object that `attach` returns. Its methods check that a call is possible, and pass
it on; the optimizers' steps go to `runtime.py`.

`assembly.py` makes the parts. A run begins in `startup.py` and `first_step.py`, and ends in
`finish.py`; an island stops in `leaving.py`. Saved state is in `resume.py`, and the readable state
in `readings.py`.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..config.auto import AutoChoice, method_note
from ..config.schema import ExchangeConfig
from ..errors import PeerLost
from ..hosts.base import TrainingHost
from ..rendezvous.sibling_watch import collective
from ..rendezvous.topology import Topology
from ..status import leave, status_of
from . import assembly, backup, finish, leaving, replay, resume, startup, summary
from .assembly import Phases
from .consensus import IslandConsensus
from .first_step import FirstStep, refuse_unknown
from .leaving import Departures
from .message import LocalStatus
from .readings import Readings
from .refusals import Copies, refuse_foreign_savers, refuse_meta, refuse_shown, warn_of_outside
from .saved_state import ExchangeState
from .sending import ExchangeConnections
from .startup import Start, StateSource

log = logging.getLogger("fsdp_demo")

_SHOWN = (
    "a step inside outer_parameters() would be lost when the replica's own parameters come back: "
    "leave the context, then train"
)


class Exchange(Readings):
    """The exchange between the replicas of one model; made by `attach`.

    Attributes:
        topology: the place of this rank among islands and ranks.
        host: the engine's parameters and optimizers.
        newcomer: this island has joined a run under way: parameters, state and step were replaced
            by those of the others. Until its first step they answer no questions of this one.
        opened: the configuration that was given, before it was known where its phases begin.
        auto_choice: the chosen method of an "auto" run with its measurements; else None.
        told: where this island has joined a run under way, what the donor's trainer has told
            (`tell_newcomers`).
        shows_result: the model holds `outer_parameters` at the moment, not this replica's own.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=2)
        >>> for _ in range(4):
        ...     model(torch.ones(1, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
        >>> exchange.step
        4
        >>> exchange.finish()
    """

    def __init__(
        self,
        host: TrainingHost,
        config: ExchangeConfig,
        model: torch.nn.Module | None,
        topology: Topology,
        start: Start | None = None,
        opened: ExchangeConfig | None = None,
        auto_choice: AutoChoice | None = None,
    ):
        start = start or Start()
        self.opened, self.auto_choice = opened or config, auto_choice
        assembly.check(config, host)
        if config.backup_islands:
            backup.refuse(topology)
        backup.refuse_pairs(config, topology)
        if topology.islands > 1:  # alone nothing is sent: shapes are enough to plan with
            refuse_meta(host, model)
        refuse_unknown(host, model, config.own_tensors)
        host.init_optimizer_state()
        self.shows_result = self.newcomer = False
        self._equal: bool | None = None
        self.told: dict[str, Any] = {}
        status = LocalStatus(topology.islands, alone=topology.elastic or config.pairs is not None)
        self._connections = ExchangeConnections(
            topology,
            host.shard_position(topology.rank, topology.world),
            host.device,
            lambda: status.told,  # not by the exchange: whoever beats must not keep the model
        )
        self._departures = Departures(topology, self._connections)
        try:
            Copies(host, self._connections.island).check()
            phases = self._phases = Phases(self, self._departures, model, start.facts)
            runtime = assembly.assemble(
                config, topology, host, model, self._connections, status, phases, start.step
            )
            super().__init__(topology, host, self._connections, runtime)
            self._hooks = runtime.hooks
            runtime.pace.last = summary.total_steps(start.facts) or 0
            self._first = FirstStep(runtime, model, lambda: self.shows_result)
            phases.begin(runtime, self._first)
            with self.paused(), torch.no_grad():
                self._join(start, model)
                if start.catch_up:
                    self.catch_up()
            self._announce = partial(
                summary.announce, self._runtime, start.batch, summary.total_steps(start.facts)
            )
            self._announce()
            if topology.rank == 0:
                warn_of_outside(host, model, topology.name)
        except BaseException:  # Ctrl-C while waiting for peers, too
            self._close()
            raise
        self._departures.listen()
        # a script that forgets finish() must not end with a live process group
        self._exit = partial(_end_at_exit, weakref.WeakMethod(self._at_exit))
        atexit.register(self._exit)
        self._hooks.start()

    @torch.no_grad()
    def choose(
        self,
        config: ExchangeConfig,
        model: torch.nn.Module | None,
        auto_choice: AutoChoice | None = None,
    ) -> None:
        """Replace the method, which has exchanged nothing so far, by that of `config`, on which all
        islands have agreed. All ranks of all islands call it at the end of the same step.

        Args:
            auto_choice: the choice that led to it, of an "auto" run.

        Raises:
            ValueError: the method is not defined for these optimizers or parameters.
        """
        assembly.change_method(self._runtime, config, model)
        self.auto_choice = auto_choice or self.auto_choice
        self._announce()

    def on_step_end(self, call: Callable[[], None] | None) -> None:
        """From now on call this at the end of each step, in the place of what was called there
        before; None: nothing. All ranks of the island come to it together.
        """
        self._phases.at_end = call

    def on_left_out(self, call: Callable[[], Any]) -> None:
        """Call this from now on in each step that this island leaves out, since it is slower than
        another (`local_steps`): `scheduler.step`, so that rates follow the clock of the run.
        """
        self._runtime.pace.at_left_out.append(call)

    @property
    def can_leave_out(self) -> bool:
        """Whether something follows the steps that this island would leave out (`on_left_out`)."""
        return bool(self._runtime.pace.at_left_out)

    def raise_stopped(self, on: bool) -> None:
        """Whether a stop is raised as `Stopped` from now on, as at first; not for a loop that looks
        at `stopped` by itself.
        """
        self._phases.raises_stopped = on

    def tell_newcomers(self, tells: Callable[[], dict[str, Any]]) -> None:
        """From now on hand what this gives to an island that joins (`told`), with the state of the
        same step: JSON of at most a megabyte, such as a trainer's own state.
        """
        self._phases.tells = tells

    def _join(self, start: Start, model: torch.nn.Module | None) -> None:
        """Agree on the run, make replicas and channels' state equal; or join a run under way."""
        self.newcomer = replay.newcomer(self._runtime)
        if self.newcomer:
            self._first.pause()
            self.told = replay.join(self._runtime, model, start.facts)
            self._runtime.pace.go_on(start.state, start.step, self.topology, self.step)
            self._first.joined(later=True)
            return
        donor, goes_on = startup.come_together(self._runtime, start, model)
        if (saved := start.state) is not None:
            tree = saved if isinstance(saved, dict) else saved.state_for(self)
            agreed = self._runtime.step
            resume.load(self._runtime, ExchangeState.from_tree(tree))
            if agreed > self._runtime.step:  # another island is further
                self._runtime.go_to(agreed)
                self._runtime.status.settled = 0
                for c in self.channels:
                    c.enter(agreed)
        startup.take_over(self._runtime, donor, goes_on)
        self._runtime.pace.go_on(start.state, start.step, self.topology, self.step)
        if self.peers is not None:
            self.peers.begin()
        self._first.joined()

    @torch.no_grad()
    @collective("rejoin()")
    def rejoin(
        self,
        state: dict[str, Any] | StateSource | None,
        step: int,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Join the other islands once more, for an engine that loads a checkpoint after `attach`.
        All ranks of all replicas call it together, each with its parameters and inner optimizer
        states loaded. Messages under way are dropped.

        Args:
            state, model: as for `attach`. Without a state channels start anew, and all replicas
                take over from the one that is furthest.
            step: the job's step, where there is no state.

        Raises:
            ValueError: the state does not belong to this run.
            RuntimeError: inside `outer_parameters`; the exchange has ended.
        """
        refuse_shown(self.shows_result, "rejoin()")
        self._runtime.check_usable()
        resume.forget(self._runtime)
        self._runtime.go_to(step)
        self._equal = None
        with self.paused():
            self._join(Start(step, state, fresh=True), model)
            self.catch_up()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Send the messages under way in the resumed state once more. If a loss has cut off the
        exchange of the last step, wait until the others have come so far, and apply it. Does
        nothing when called again.

        `attach` calls it, unless `catch_up=False`: then the caller may ask the islands questions
        first, and calls this method ahead of the first forward pass.
        """
        self._first.catch_up()

    def accept_parameters(self) -> None:
        """Accept parameters that were written since `attach` or the last step, which the next step
        would refuse or warn of: for a host that restores this replica's own from its saved state.
        """
        self._first.accept_parameters()

    def report(
        self, tokens: int = 0, loss: float | Tensor | None = None, weight: Any = None
    ) -> None:
        """Report this rank's tokens since the last call, for logs and the island's weight, and its
        loss, before the optimizer's step that they belong to: a resume takes a step that was cut
        off again, and counts its tokens then. `weight`, a number, weighs in their place: labels,
        where tokens have none. The next message has the mean of the losses since the last one,
        without NaN; tensors are read only then."""
        self._runtime.status.add(tokens, loss, weight)

    @collective("time_is_up()")
    def time_is_up(self, micro: int, of: int) -> bool:
        """Whether to leave out micro-batch `micro`, from 0, of the `of` of this step, since the
        time of `drop.limit` is over (DropCompute, arXiv 2306.10598). Call it ahead of each, on all
        ranks of the island, which get the same answer; never true for the first and the last one.

        Raises:
            ValueError: it was not called for the micro-batch before.
        """
        up = self._runtime.drop.time_is_up(micro, of)
        if up:
            self._hooks.leave_out()
        return up

    def watch_gradients(self) -> None:
        """Check the gradients of every step, also where the exchange neither clips nor sends them:
        if they hold NaN or Inf the inner optimizer takes no step, and its moments stay finite. The
        check costs a pass over the gradients.
        """
        self._runtime.watch_gradients()

    def rows_compared(self) -> None:
        """Skip the comparison of first payloads, for a host that has compared the rows."""
        self._queue.watch.compares = False

    def request_stop(self, together: bool = False) -> None:
        """Ask to stop, in the next payload; all islands stop after the step in which it is applied.
        Safe in a signal handler.

        Args:
            together: wait for that, however long the period. False: where no payload leaves in the
                next step, this island stops after it (of several ranks: within about a second,
                all after one step), and the others notice at their next exchange. True raises
                ValueError where islands exchange in pairs.
        """
        if together and self.config.pairs is not None:
            what = "request_stop(together=True) with pairs, whose messages reach one other island"
            raise ValueError(f"{what}: send SIGTERM to all, or agree by exchange.across_islands")
        self._runtime.status.request_stop(together)

    @collective("stop_here()")
    def stop_here(self) -> None:
        """Let a wish to stop now take effect between two steps, for a host that was told to end in
        an evaluation or a save: `stopped` says whether it does. All ranks of the island call it
        together."""
        self._runtime.settle_stop(now=True)

    @collective("leave()")
    def leave(self, stopped: bool) -> None:
        """Tell the other islands that this one trains no further, before it saves (`guard` and the
        Trainer call it). Where islands come and go the others train on.

        Args:
            stopped: the island was told to stop. Where islands come and go all its ranks call this
                together, and try for at most half of ISLAND_STOP to send its part of the coming
                exchange ahead.
        """
        self._departures.leave(self._runtime, stopped)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context the optimizers' steps do not count and nothing is exchanged."""
        with self._hooks.paused():
            yield

    def skip(self) -> None:
        """Count a step that this replica does not take (its loss was NaN), and take part in a due
        exchange. All ranks of the island call it together instead of `optimizer.step()`.

        A plain gradient channel leaves this replica out of the mean and applies the mean of the
        others; with an accumulator nothing is added to it.
        """
        self._runtime.skip()

    @torch.no_grad()
    @collective("flush()")
    def flush(self) -> None:
        """Wait for the messages in flight and apply them, oldest first."""
        refuse_shown(self.shows_result, "flush()")
        self._runtime.check_usable()
        finish.flush(self._runtime)
        self._first.accept_parameters(loads=False)

    @torch.no_grad()
    @collective("reset()")
    def reset(self, parameters: Iterable[Tensor | str]) -> None:
        """Take over parameters that the script has written: their values become the mean over the
        islands and the new anchor; outer momentum, error feedback and accumulators of them are
        zero. All ranks of all islands call it at one step. Messages under way are applied first, to
        the other parameters. Moments of the inner optimizer are left alone.

        Args:
            parameters: whole trained parameters of the attached optimizers, or their names.

        Raises:
            ValueError: on all islands, before anything is changed: it is no such parameter, or
                islands bring others or stand at unlike steps.
            Mismatch: another island is in another call. NotFinite: no island has finite values.
        """
        refuse_shown(self.shows_result, "reset()")
        self._runtime.check_usable()
        self.catch_up()
        finish.reset(self._runtime, parameters)
        self.accept_parameters()

    @torch.no_grad()
    @collective("finish()")
    def finish(self, close: bool = True) -> None:
        """End the exchange: apply the messages in flight, exchange the changes since, and leave all
        replicas with equal parameters. All replicas call it at the same step.

        Inside a round the last exchange is the plain mean of the replicas' changes, without an
        outer step (`finish.conclude`). Where the preset has no consensus, the parameters become
        their mean over the replicas, and `drift` is the distance of this one. Calling it again does
        nothing.

        Args:
            close: False keeps the connections for `across_islands`, until `finish()` is called
                again.
        """
        if self.closed:
            return
        refuse_shown(self.shows_result, "finish()")
        if not self._runtime.ended:
            self._runtime.check_usable()
            self.catch_up()
            self._first.check(stepped=False)
            self._equal = finish.conclude(self._runtime)
            self._first.look_at_frozen()
            unlike = self._first.unlike_buffers()
            self._runtime.end()
            summary.ended(self._runtime, self.totals(), self._equal, unlike)
        if close:
            self._departures.finish(self.step)
            self._close()

    @property
    def across_islands(self) -> IslandConsensus:
        """Small collectives of all islands at one step. Raises RuntimeError when the islands are no
        longer connected."""
        if self._queue.broken or self.closed:
            raise RuntimeError("the islands are connected no more: ask before finish()")
        # islands that resume at unlike steps between the same exchanges may ask before they go on
        return IslandConsensus(
            self._queue,
            self.island,
            lambda: 0 if self.step == self._first.joined_at else self.step,
        )

    @collective("digests_equal()")
    def digests_equal(self) -> bool | None:
        """Whether the trained parameters of all replicas are bit-equal now; None after `finish()`
        of a preset without consensus.

        All ranks of all islands call it at the same step."""
        if self.finished and self._equal is not None or self.closed:
            return self._equal
        return finish.equal(self._runtime)

    @contextmanager
    def outer_parameters(self, model: torch.nn.Module) -> Iterator[None]:
        """Within this context `model` holds the method's result, to evaluate and export it: the
        anchor, or the mean over the replicas (`result_kind`). For a mean all replicas enter at the
        same step. A step, `flush`, `finish` and `state_dict` raise RuntimeError inside.
        """
        kind = "parameters" if self.finished or self._queue.broken else self.result_kind
        with (
            self._calls.within("outer_parameters()"),
            self._hooks.paused(_SHOWN),
            finish.shown(self._runtime, model, kind),
        ):
            self._runtime.pace.disturbed()
            before, self.shows_result = self.shows_result, self.shows_result or kind != "parameters"
            try:
                yield
            finally:
                self.shows_result = before

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank that must survive a restart, as tensors and numbers: step,
        channels, and messages in flight, which are waited for.

        Where islands come and go it waits until all of them have the same messages: the others
        might settle a missing one otherwise. The state belongs to this shard of this replica: save
        one per rank. Tensors are references to the live state: save them before the next step.

        Raises:
            PeerLost: the others do not get so far within ISLAND_TIMEOUT.
            RuntimeError: inside `outer_parameters`.
            ValueError: the caller is `torch.distributed.checkpoint` or `Accelerator.save_state`,
                which keep one rank's state for all.
        """
        refuse_foreign_savers()
        refuse_shown(self.shows_result, "state_dict()")
        self._runtime.pace.disturbed()
        state = resume.state(self._runtime).to_tree() | method_note(self.config, self.auto_choice)
        if (peers := self.peers) is not None and not peers.wait_stable(peers.timeout):
            raise PeerLost(
                f"not all islands have what this one would save at step {self.step}, after "
                f"{peers.timeout:g} s: not saved"
            )
        return state

    @collective("load_state_dict()")
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the run back to `state_dict()` of the same rank, bit for bit.

        All ranks of all islands call it at the same step, with states of one step, and load model
        and optimizer, too. Messages under way are waited for and dropped. In a new process, or
        with states of unlike steps, use `attach(state=...)`: then the islands agree on a step.

        Raises:
            ValueError: it was saved with other channels, or with another number of islands or
                ranks; or after a loss, with messages that never came back.
            RuntimeError, PeerLost: the state is of another step, and the exchange has ended or has
                failed.
        """
        saved, before = ExchangeState.from_tree(state), self.step
        resume.roll_back(self._runtime, saved)
        self.accept_parameters()
        if self.step != before:
            self._first.go_on_from(self.step)

    def detach(self) -> None:
        """Remove the hooks and close the connections at once, without a last exchange."""
        self._hooks.stop()
        self._close()

    def _close(self) -> bool:
        # at every end: finish(), detach(), an error in attach, a dropped exchange, exit. What is
        # hooked into model or optimizer beside the steps is taken away here.
        if hasattr(self, "_exit"):
            atexit.unregister(self._exit)
        if hasattr(self, "_runtime"):
            self._calls.close()
        if hasattr(self, "_first"):
            self._first.close()
        self._departures.close()
        return self._connections.close()

    def _at_exit(self) -> None:
        leaving.warn_of_no_finish(self._runtime)
        if not self._close():
            log.error(
                "%s: an exchange was still waiting for a silent peer at exit", self.topology.name
            )
            # the interpreter would end threads that wait in gloo by aborting the process
            leave(status_of(getattr(sys, "last_value", None)))

    def __del__(self) -> None:
        # Nobody can call finish() any more, and heartbeats would have the others wait for this one.
        # The collector may run in one of the threads that end here, or in the midst of a log line.
        if hasattr(self, "_exit") and not self.closed:
            threading.Thread(target=self._dropped, name="close", daemon=True).start()

    def _dropped(self) -> None:
        leaving.warn_of_no_finish(self._runtime)
        self._close()


def _end_at_exit(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (end := method()) is not None:
        end()
