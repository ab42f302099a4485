"""What happens when a checkpoint cannot be written: training goes on, but not for ever."""

from __future__ import annotations

import logging

from ..errors import see

log = logging.getLogger("fsdp_demo")

LAST_FAILURE = 3
"""Saves that may fail one after the other; this one raises."""


class SaveFailures:
    """Counts the saves of one replica that failed. All its ranks count the same.

    Args:
        name: of the replica, for the log.

    Attributes:
        count: of this life.
        in_a_row: since the last one that was made.
    """

    def __init__(self, name: str):
        self.name = name
        self.count = self.in_a_row = 0

    def made(self) -> None:
        """A save was made."""
        self.in_a_row = 0

    def failed(self, what: str, why: Exception, speaks: bool = True) -> None:
        """One could not be made; the third in a row raises `why`.

        Args:
            what: "checkpoint of step 4 not saved", say.
            speaks: this rank warns.
        """
        self.count, self.in_a_row = self.count + 1, self.in_a_row + 1
        if self.in_a_row >= LAST_FAILURE:
            raise why
        if speaks:
            text = "%s: %s (%s); training goes on, failure %d in a row of the %d that end it" + see(
                "save-failed"
            )
            log.warning(text, self.name, what, why, self.in_a_row, LAST_FAILURE)
