"""Between attach and the first step: what a loss has cut off is made up for, and parameters must still be what attach left."""

from __future__ import annotations

import logging

from .refusals import refuse_sparse
from .runtime import Flow
from .untouched import Untouched

log = logging.getLogger("fsdp_demo")


class FirstStep:
    """What is to be done once, ahead of the first step: `Flow.ahead` until then.

    Attributes:
        joined_at: the step from which this replica goes on.
    """

    def __init__(self, flow: Flow):
        self._flow, self._untouched = flow, Untouched(flow.shards, flow.island)
        self._behind = False
        self.joined_at = flow.step

    def joined(self) -> None:
        """The islands have come together: all of it is to be done."""
        self.joined_at, self._behind = self._flow.step, True
        self._untouched.note()
        self._flow.ticks.aside = False
        self._flow.ahead = self._run if self._untouched.pending else None

    def _run(self) -> None:
        """Do what is left, again as long as it fails.

        Raises:
            ValueError: parameters were changed since attach; gradients are sparse.
        """
        self.catch_up()
        self.check()
        self._flow.ahead = None
        if self._flow.config.needs_gradients:
            refuse_sparse(self._flow.shards)

    def check(self) -> None:
        """Refuse parameters that were changed since attach, but by steps inside `paused()`."""
        if self._flow.ticks.aside:
            self._untouched.forget()
        self._untouched.check()

    def accept_parameters(self) -> None:
        """See `Exchange.accept_parameters`."""
        if self._untouched.pending:
            self._untouched.note()

    def catch_up(self) -> None:
        """See `Exchange.catch_up`."""
        if self._behind:
            self._behind = False
            self._send_again()
            self.accept_parameters()

    def _send_again(self) -> None:
        """Send what was under way once more; make up for the after-step exchange of the last step, if it was cut off by a loss."""
        flow = self._flow
        flow.mailbox.send_again()
        late = flow.after_step
        cut = [c for c in late if flow.mailbox.overdue(c, flow.step)]
        if not cut:
            return
        log.info("%s: the exchange of step %d was cut off: made up for when all islands have come so far", flow.topology.name, flow.step)
        flow.step -= 1
        try:
            stages = [[c for c in late if bool(c.channel.after) == second] for second in (False, True)]
            flow.land(stages[0], flow.step)
            if any(c in stages[0] for c in cut):  # those of the second stage had not left yet
                flow.send([c for c in stages[1] if c.channel.clock.due(flow.step)])
            flow.land(stages[1], flow.step)
        finally:
            flow.step += 1
