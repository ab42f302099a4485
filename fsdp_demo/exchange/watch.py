"""What one rank sees in the messages of all islands: replicas that are no longer equal, that are
not finite or far from the others, that all say the same."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.digests import odd_ones
from ..comm.header import FAR, NOT_FINITE, SUMMED, Header, norm_of, rate_of
from ..comm.peers import PeerGroup
from ..errors import Mismatch, NotFinite, see
from .local_status import give_up

log = logging.getLogger("fsdp_demo")


class Watch:
    """Looks at the messages of one peer group.

    Args:
        peers: None on a copy that has none, which sees nothing.
        speaks: this rank logs what it sees (one rank of each island does).

    Attributes:
        left_out: contributions of replicas that were not finite, so far. far: those whose norm was
            far from the members'.
        unlike: islands have other hardware or libraries: sums that differ are logged, not refused.
        compares: no message yet that holds anything but zeros.
        loss: the mean over the islands of those in the last headers that had one. stop: flags STOP
            and LEAVING of what has arrived.
    """

    def __init__(self, peers: PeerGroup | None, speaks: bool):
        self.left_out, self.far, self.unlike, self._speaks, self._run = 0, 0, False, speaks, 0.0
        self.compares = speaks and peers is not None and peers.size > 1
        self.loss, self.stop = math.nan, 0
        self._warned = self._rates_warned = False

    def check(self, peers: PeerGroup, headers: Sequence[Header], gradients: bool) -> None:
        """Warn of unlike learning rates; refuse sums that must be equal and are not, and a mean of
        nobody. In the worker's thread, before the island votes.

        Raises:
            Mismatch: replicas have parted. NotFinite: parameters are to be averaged, and no replica
                has finite ones.
        """
        self._compare_rates(peers, headers)  # they may be why sums differ
        odd = odd_ones([h.total if h.flags & SUMMED else None for h in headers])
        if odd:
            what = "parameters" if gradients else "outer parameters (anchors)"
            sums = ", ".join(f"{peers.label(j)} {headers[j].total:016x}" for j in odd)
            text = (
                f"replicas are no longer equal: {what} at step {headers[0].step} have other bits "
                f"on {sums}"
            )
            if not self.unlike and peers.elastic and 2 * len(odd) < len(headers):
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
                f"no island has finite parameters (NaN or Inf) at step {headers[0].step}: resume "
                "from a checkpoint"
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
                headers[0].step + 1,
                rate_of(headers[low].rate),
                peers.label(low),
                rate_of(headers[high].rate),
                peers.label(high),
                see("rates-differ"),
            )

    def compare(
        self, peers: PeerGroup, bodies: Sequence[Tensor], blank: bool, reduced: bool
    ) -> None:
        """Warn once if the first messages that hold anything but zeros are the same from all
        islands: two or more. In the worker's thread.

        `blank`: the sections of the body hold nothing else; `reduced`: there were vectors, too
        (`PeerGroup.alike`, `PeerGroup.something`)."""
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
    ) -> NotFinite | None:
        """Count and name what was left out of the message of `step`; the error, if this replica
        does not come back by itself.

        `slots`: whose headers these are; empty where that is not known."""
        bad, far = (
            [j for j, h in enumerate(headers) if h.flags & flag] for flag in (NOT_FINITE, FAR)
        )
        self.left_out, self.far = self.left_out + len(bad), self.far + len(far)
        if peers is None or not slots:
            return None
        if bad and self._speaks:
            names = ", ".join(peers.label_of(slots[j]) for j in bad)
            log.warning("step %d: not finite (NaN or Inf) on %s, left out", step + 1, names)
        if far and self._speaks:
            names = ", ".join(
                f"{peers.label_of(slots[j])} ({norm_of(headers[j].norm):.2g})" for j in far
            )
            others = max(
                (norm_of(h.norm) for j, h in enumerate(headers) if j not in far), default=0.0
            )
            log.warning(
                "step %d: norm far from the others' (at most %.2g) on %s, left out",
                step + 1,
                others,
                names,
            )
        mine = peers.slot in [slots[j] for j in (*bad, *far)]
        self._run = (self._run + 1.0) * mine
        # no island has anything that this one could come back with
        others_too = len(bad) + len(far) == len(headers)
        try:
            give_up(
                self._run,
                None if others_too else peers,
                "were far from the others'" if far else "were not finite (NaN or Inf)",
            )
        except NotFinite as error:
            return error
        return None

    def warn_of_rewritten(self) -> None:
        """Something else than the base optimizer has written parameters of this island (see
        `Rewritten`): say so once."""
        if self._speaks and not self._warned:
            self._warned = True
            log.warning(
                "parameters were written between an exchange and the step after it, by something "
                "other than the attached optimizer. A wrapper that writes them from its own copy "
                "undoes exchanges: leave it out, or take a preset that exchanges gradients. Weight "
                "clipping is allowed, and counts as a move of this island%s",
                see("parameters-written"),
            )

    def hear(self, headers: Sequence[Header], stop: int) -> None:
        """Note what the headers of a message say, once the island has voted that it is here.
        `stop`: its flags on any rank.
        """
        self.stop |= stop
        losses = [h.loss for h in headers if not math.isnan(h.loss)]
        self.loss = sum(losses) / len(losses) if losses else self.loss
