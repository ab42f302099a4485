"""Wishes to stop: of callbacks (early stopping, a time limit), which all islands follow at one
step; and signals to end, which cannot wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...exchange.exchange import Exchange
from ...exchange.guard import Deadline, stop_signals
from ...status import SAVED, tell_launcher


class Stops:
    """The wishes to stop that one training has heard.

    Args:
        live: the exchange while it runs, else None.
        warn: says something once per island.
        to_resume: how training goes on after status 75, for the log.

    Attributes:
        ending: the end is agreed, or reached: nothing is held any more.
        left: this island stopped before the end, and the others know: its process ends with status
            75.
        cut_off: a mesh was told to end by a signal (here), and has stopped before the end.
        unsaved: its newest save has failed.
        told: a signal has told this rank to end.
    """

    def __init__(
        self,
        live: Callable[[], Exchange | None],
        warn: Callable[[str], None],
        to_resume: Callable[[], str],
    ):
        self._live, self._warn, self._to_resume = live, warn, to_resume
        self.ending = self.left = self.cut_off = self.unsaved = self.told = self._asked = False
        self._deadline: Deadline | None = None

    def hold(self, control: Any) -> None:
        """Take a callback's wish out of `control`, until all islands have heard it."""
        exchange = self._live()
        holds = exchange is not None and exchange.topology.islands > 1 and not self.ending
        if holds and control.should_training_stop:
            control.should_training_stop = False
            self.ask("a callback")

    def ask(self, who: str) -> None:
        """Send the wish to stop with the next payload; `who` asks, for the log."""
        exchange = self._live()
        if exchange is None or self._asked:
            return
        self._asked = True
        exchange.request_stop(together=True)
        after = "training ends after the next step"
        if exchange.topology.islands > 1:
            step = exchange.next_exchange() + 1
            after = f"all islands do when the exchange of step {step} has been applied"
        self._warn(f"{who} asks to stop: {after}")

    def end(
        self, exchange: Exchange, args: Any, state: Any, control: Any, saved: bool = False
    ) -> None:
        """Stop this island after the present step: ask the Trainer for a checkpoint, unless that is
        `saved`, and tell the other islands if they do not know. Who is told to end has no time for
        an evaluation.
        """
        self.ending = control.should_training_stop = True
        control.should_evaluate &= not exchange.leaving
        control.should_save = not saved and (control.should_save or args.save_strategy != "no")
        what = "not saved (save_strategy='no')"
        if saved or control.should_save:
            what = f"checkpoint-{state.global_step} is saved"
        together = exchange.topology.islands > 1 and not exchange.stopped_alone
        who = "all islands stop" if together else "this island stops"
        self._warn(f"{who} after step {state.global_step} of {state.max_steps}, as asked; {what}")
        if exchange.topology.one_world:
            self.cut_off = self.told
        elif exchange.leaving:
            self.left = True
            exchange.leave(stopped=True)

    def leave(self, rank: int) -> None:
        """End the process of a rank as a plain loop does under `guard`; launchers hear that it can
        go on. Raises SystemExit: with status 75; with 1 where the last save has failed.
        """
        if self.unsaved:
            self._warn("its last save failed (above: why): free the disk, then start it again")
            raise SystemExit(1)
        self._warn(f"{self._to_resume()}. It ends with status {SAVED}")
        tell_launcher(rank, SAVED)
        raise SystemExit(SAVED)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Take ISLAND_STOP_SIGNALS for a wish to stop within this context, which ends within
        ISLAND_STOP.
        """
        try:
            with stop_signals(self._terminate):
                yield
        finally:
            if self._deadline is not None:
                self._deadline.end()

    def _terminate(self) -> bool:
        """Handle a signal to end. An island stops after its current step, since the next exchange
        may be too far away. In a mesh all nodes save together, so there the wish travels with the
        exchange. A second signal is the same wish. Before the exchange the handler that was there
        before takes the signal (False).
        """
        exchange, again = self._live(), self.told
        if exchange is None and not self.ending:
            return False
        self.told = True
        if again:
            return True
        if exchange is None:
            self._warn("told to end: training has ended; a save that is due is made")
            return True
        if exchange.topology.one_world:
            self.ask("a signal to end")
        else:
            exchange.request_stop()
            self._warn("told to end: this island stops after its current step and tells the others")
        self._deadline = Deadline(exchange, self._to_resume)
        self._deadline.begin(told=True)
        return True
