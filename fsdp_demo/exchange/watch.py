"""Checks of one rank on the messages of all islands: replicas that are no longer equal, not finite,
far from the others, or all alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from ..elastic.peer_group import PeerGroup
from ..errors import Mismatch, NotFinite, first_few, see
from ..peers.header import BEYOND, FAR, NOT_FINITE, SUMMED, Header, norm_of, rate_of
from ..rendezvous.island import IslandGroup
from .rewritten import odd_ones

log = logging.getLogger("fsdp_demo")

LIMIT = 10
"""Contributions in a row that are left out, not finite or far from the others', before the replica
is ended (`give_up`): it does not recover by itself, and its last checkpoint is still whole."""

MESSAGES = 16
"""Messages of which the norms are remembered."""

LEAST = 4
"""Messages before which nothing finite is left out."""

MOST = 1 << 16
"""Messages that norms are remembered of, and islands in one, at most."""

Codes = Annotated[list[Annotated[int, Meta(gt=0, lt=256)]], Meta(min_length=1, max_length=MOST)]
Kept = dict[str, Annotated[list[tuple[int, Codes]], Meta(max_length=MOST)]]
"""By the channels of a message: its step and the norms in it that counted, oldest first."""


class Norms:
    """The norms in the last messages of one peer group. From them every island decides alike which
    contributions are far from the others'.

    `Header.norm` is the norm of an island's contribution. The contribution is left out when its
    norm is more than `limit` times both medians: that of the last MESSAGES messages of the same
    channels, and that of this message. The first shows the usual size where there is only one other
    to compare with; the second lets all change together. Both are the lower median, so at least one
    is left. Small norms do no harm and are not checked. Inf and NaN are left out from the first
    message on, unless they are the median.

    The norms follow from the headers of delivered messages, in their order, so they are equal on
    all islands. They are saved with a checkpoint, and handed to islands that join.

    Args:
        limit: `ExchangeConfig.norm_limit`.
        in_flight: messages of the same channels that may be under way at once.
    """

    def __init__(self, limit: float | None, in_flight: int = 1):
        self._limit, self._room = limit, MESSAGES + in_flight
        self._kept: dict[str, list[tuple[int, list[int]]]] = {}

    def judged(self, members: Collection[str], headers: Sequence[Header]) -> list[Header]:
        """The headers of the next message of these channels, with FAR set in those left out."""
        known = [replace(h, flags=h.flags & ~FAR) if h.flags & FAR else h for h in headers]
        before = self._kept.get(_key(members), [])[-MESSAGES:]
        now = [h.norm for h in known if _counts(h)]
        if self._limit is None or not now:
            return known
        middle, most = median(now), math.inf
        if len(before) >= LEAST:
            usual = max(median([code for _, codes in before for code in codes]), middle)
            most = self._limit * norm_of(usual)
        return [
            replace(h, flags=h.flags | FAR)
            if _counts(h) and (norm_of(h.norm) > most or h.norm == BEYOND > middle)
            else h
            for h in known
        ]

    def note(self, members: Collection[str], step: int, headers: Sequence[Header]) -> None:
        """Keep the norms of a message from its headers, as they were judged."""
        codes = [h.norm for h in headers if _counts(h) and not h.flags & FAR]
        if codes and self._limit is not None:
            # a message that is sent once more replaces itself
            before = [entry for entry in self._kept.get(_key(members), []) if entry[0] != step]
            self._kept[_key(members)] = sorted([*before, (step, codes)])[-self._room :]

    def state(self, without: Collection[tuple[Sequence[str], int]] = ()) -> dict[str, Any]:
        """The norms as JSON. without: channels and step of messages that are still to arrive."""
        left = {(_key(members), step) for members, step in without}
        found = {
            key: [[step, list(codes)] for step, codes in kept if (key, step) not in left]
            for key, kept in list(self._kept.items())
        }
        return {key: entries for key, entries in found.items() if entries}

    def load(self, kept: Kept) -> None:
        """The inverse of `state`."""
        self._kept = {
            key: [(step, list(codes)) for step, codes in entries] for key, entries in kept.items()
        }


def median(values: Sequence[int]) -> int:
    """The lower median.

    >>> median([3, 1, 2]), median([1, 9])
    (2, 1)
    """
    return sorted(values)[(len(values) - 1) // 2]


def _key(members: Collection[str]) -> str:
    return ",".join(members)


def _counts(header: Header) -> bool:
    return header.norm > 0 and not header.flags & NOT_FINITE


class Watch:
    """The checks of one rank on the messages of its peer group.

    Args:
        peers: None on a copy without peers.
        speaks: this rank logs; one rank of each island does.

    Attributes:
        left_out: number of contributions so far that were not finite. far: of those whose norm was
            far from the others'. late: of those that were late, and come with the next.
        unlike: islands have other hardware or libraries: sums that differ are logged, not refused.
        compares: all messages so far held nothing but zeros.
        written: tensors of this rank that were rewritten (`Rewritten`) and not told of, by name;
            True where that was seen after another step, too.
        loss: the mean over the islands of the losses in the last headers that had one. stop: flags
            STOP and LEAVING of the messages that have arrived.
    """

    def __init__(self, peers: PeerGroup | None, speaks: bool):
        self.left_out, self.far, self.unlike, self._speaks, self._run = 0, 0, False, speaks, 0.0
        self.late = 0
        self.compares = speaks and peers is not None and peers.size > 1
        self.loss, self.stop = math.nan, 0
        self.written: dict[str, bool] = {}
        self._rates_warned, self._told = False, set[str]()

    def check(self, peers: PeerGroup, headers: Sequence[Header], gradients: bool) -> None:
        """Warn of unlike learning rates; refuse parameters that are not equal, or nowhere finite.
        In the worker's thread, before the island votes. Raises Mismatch: replicas are no longer
        equal. NotFinite: parameters are to be averaged, and no replica has finite ones.
        """
        self._compare_rates(peers, headers)  # ahead of the sums, which may differ because of them
        odd = odd_ones([h.total if h.flags & SUMMED else None for h in headers])
        if odd:
            what = "parameters" if gradients else "outer parameters (anchors)"
            sums = ", ".join(f"{peers.label(j)} {headers[j].total:016x}" for j in odd)
            text = (
                f"replicas are no longer equal: {what} at step {headers[0].at_step} have other "
                f"bits on {sums}"
            )
            if not self.unlike and not peers.fixed and 2 * len(odd) < len(headers):
                if peers.rank in odd:
                    peers.expel(text)
                if self._speaks:
                    log.error("%s: they end, and come back as newcomers", text)
            elif not self.unlike:
                cure = f"resume from a checkpoint{see('replicas-differ')}"
                raise Mismatch(
                    f"{text}. A memory error, or code that changes parameters on one island alone; "
                    f"{cure}"
                )
            elif self._speaks:
                log.warning(
                    "%s; the islands have other hardware or libraries, so training goes on", text
                )
        if all(h.flags & NOT_FINITE for h in headers) and not gradients:
            raise NotFinite(
                f"no island has finite parameters (NaN or Inf) at step {headers[0].at_step}: "
                "resume from a checkpoint"
            )

    def _compare_rates(self, peers: PeerGroup, headers: Sequence[Header]) -> None:
        """Warn once if islands have other learning rates: more than 0.3 % apart."""
        said = [j for j, h in enumerate(headers) if h.rate]
        low, high = (f(said, key=lambda j: headers[j].rate, default=0) for f in (min, max))
        apart = headers[high].rate - headers[low].rate > 4  # in 1/1024 of an octave
        if apart and self._speaks and not self._rates_warned:
            self._rates_warned = True
            log.warning(
                "learning rates differ at step %d: %.3g on %s, %.3g on %s (the mean over the "
                "parameter groups). Step a scheduler on what all islands share: the same steps, "
                "or a loss from exchange.across_islands.mean%s",
                headers[0].at_step,
                rate_of(headers[low].rate),
                peers.label(low),
                rate_of(headers[high].rate),
                peers.label(high),
                see("rates-differ"),
            )

    def compare(
        self, peers: PeerGroup, bodies: Sequence[Tensor], blank: bool, reduced: bool
    ) -> None:
        """Warn once if the first messages with other values than zero are the same from all
        islands. In the worker's thread.

        Args:
            bodies: of two islands or more; blank: their sections hold nothing but zeros.
            reduced: there were vectors, too (`PeerGroup.alike`, `PeerGroup.something`).
        """
        if blank and not (reduced and peers.something):
            return
        self.compares = False
        if all(torch.equal(b, bodies[0]) for b in bodies) and (not reduced or peers.alike):
            log.warning(
                "all islands sent the same first payload, to the last bit: do they train on the "
                "same rows? Give each island its own part, "
                f"as in dataset.shard(topology.islands, topology.island){see('same-rows')}"
            )

    def count(
        self, peers: PeerGroup | None, headers: Sequence[Header], slots: Sequence[int], step: int
    ) -> None:
        """Count and log the contributions that were left out of the message of `step`. slots: the
        islands of the headers; empty where that is not known. Raises as `give_up`.
        """
        bad = [j for j, h in enumerate(headers) if h.flags & NOT_FINITE]
        far = [j for j, h in enumerate(headers) if h.flags & FAR]
        late = [j for j, h in enumerate(headers) if h.late]
        self.left_out, self.far = self.left_out + len(bad), self.far + len(far)
        self.late += len(late)
        if peers is None or not slots:
            return
        if bad and self._speaks:
            names = ", ".join(peers.label_of(slots[j]) for j in bad)
            log.warning("step %d: not finite (NaN or Inf) on %s, left out", step + 1, names)
        if far and self._speaks:
            norms = [norm_of(h.norm) for h in headers]
            names = ", ".join(f"{peers.label_of(slots[j])} ({norms[j]:.2g})" for j in far)
            others = max((n for j, n in enumerate(norms) if j not in far), default=0.0)
            text = "step %d: norm far from the others' (at most %.2g) on %s, left out"
            log.warning(text, step + 1, others, names)
        if late and self._speaks:
            names = ", ".join(peers.label_of(slots[j]) for j in late)
            log.info("step %d: late: %s; it counts in the next exchange", step + 1, names)
        mine = peers.slot in [slots[j] for j in (*bad, *far)]
        self._run = (self._run + 1.0) * mine
        # then no island has a state that this one could take over
        others_too = len(bad) + len(far) == len(headers)
        what = "were far from the others'" if far else "were not finite (NaN or Inf)"
        give_up(self._run, None if others_too else peers, what)

    def found_written(self, name: str, again: bool) -> bool:
        """Note a tensor that was rewritten, to be logged with the next message; False where it was
        logged before. again: it was seen after another step, too.
        """
        if name in self._told:
            return False
        self.written[name] = again or self.written.get(name, False)
        return True

    def tell_of_written(self, island: IslandGroup) -> None:
        """Log once each tensor rewritten on any rank; all ranks of the island call it."""
        found = [pair for theirs in island.everyone(self.written) for pair in theirs.items()]
        self.written = {}
        self._told.update(name for name, _ in found)
        once = list(dict.fromkeys(name for name, again in found if not again))
        always = list(dict.fromkeys(name for name, _ in found if name not in once))
        if self._speaks and once:
            log.warning(
                "parameters were written between an exchange and the step after it, by something "
                "other than the attached optimizer: %s. The next exchange may bring back a part of "
                "the old values, which anchor, outer momentum or other islands still have: call "
                "exchange.reset(parameters) after such a write, on all islands, or detach() and "
                "attach again. Leave out a wrapper that writes parameters from its own copy%s",
                first_few(once, 3),
                see("parameters-written"),
            )
        if self._speaks and always:
            log.info(
                "%s: written after the optimizer's steps (a clamp, or the like). That counts as a "
                "move of this island, which exchanges average with the others'",
                first_few(always, 3),
            )

    def take_loss_and_stop(self, headers: Sequence[Header], stop: int) -> None:
        """Take mean loss and stop flags (`stop`: on any rank) of a voted message."""
        self.stop |= stop
        losses = [h.loss for h in headers if not math.isnan(h.loss)]
        self.loss = sum(losses) / len(losses) if losses else self.loss


def give_up(
    run: float, peers: PeerGroup | None = None, what: str = "were not finite (NaN or Inf)"
) -> None:
    """End this island if `run`, the number of its contributions in a row that were left out, has
    come to LIMIT. Where islands come and go and others train, the process ends with status 75 and
    joins again with their state, so nothing is saved.

    Args:
        peers: of this rank.
        what: predicate of the contributions, for the error.

    Raises:
        NotFinite: on a peer group of fixed members, or without another island.
    """
    if run < LIMIT:
        return
    text = f"gradients or parameters of this island {what} {run:.0f} times in a row"
    if peers is not None and not (peers.fixed or peers.following) and len(peers.alive) > 1:
        peers.expel(text)
    raise NotFinite(
        f"{text}: look at the loss, the learning rate and the data, and resume from a checkpoint. "
        f"The other islands have taken nothing of it{see('not-finite')}"
    )


def drift(island: IslandGroup, far: float, norm: float) -> float:
    """|theta - mean| / |mean| of this replica from this rank's squared norms."""
    far, norm = island.sum(far, norm)
    return math.sqrt(far / norm) if norm else 0.0
