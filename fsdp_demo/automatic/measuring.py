"""What `auto` chooses by: the link between islands that have just met, measured in two seconds, and
the run as the planner wants it described.
"""

from __future__ import annotations

import math
import time

import torch

from ..config.auto import AutoChoice
from ..config.schema import ExchangeConfig
from ..elastic.agreement import gather_number, round_trip
from ..elastic.peer_group import PeerGroup
from ..exchange.assembly import check
from ..exchange.exchange import Exchange
from ..hosts.base import TrainingHost
from ..hosts.optimizers import keeps_momentum
from ..net.link import TCP_SHARE, Link
from ..peers.votes import Ranks
from ..tools.planner import Choice, Situation, choose, plan_rows
from ..tools.planner.mix import Machine
from ..tools.planner.situation import DEVICES

SIZES = tuple(1 << n for n in (14, 16, 18, 20, 22, 24))
"""Bytes of the messages, 16 KiB to 16 MiB, each four times the one before."""

ALONE = Ranks(None, 0, 1)
"""An island of one rank."""


def quick_probe(
    peers: PeerGroup | None, seconds: float = 2.0, island: Ranks = ALONE
) -> Link | None:
    """Measure the link of a peer group with messages of the exchange itself: same connections, same
    framing, checksums and encryption.

    All ranks of all islands call it at the same time, before the first step (`attach` has met
    the others, nothing is under way). Messages grow until the next one would not fit into the time.
    The first and the largest are sent twice, for cold code and TCP's slow start. Each island sends
    to all others at once, as the exchange does. The bytes count as `Meter.setup_bytes`.

    In a rehearsal (`peers.link`) nothing paces these messages: the rehearsed link bounds what is
    returned.

    Args:
        peers: None on a rank that exchanges nothing; it takes part in what the island decides.
        seconds: seconds that the measurement may take. A link on which 16 KiB take longer is
            measured with those.
        island: the ranks of this island. A message is complete when all of them hold theirs, so
            all send equally many.

    Returns:
        The same on all ranks of a peer group: the slowest rank's rate, and its round trip. None
        for a single replica, and where all others were lost meanwhile.

    Raises:
        PeerLost: an island is gone or silent.
    """
    line = peers if peers is not None and peers.size > 1 else None
    start, rtt = time.monotonic(), 0.0 if line is None else round_trip(line)
    rates, took = list[float](), 0.0

    def fits(more: float) -> bool:
        """Whether there is time for something that takes `more` times what the last message took.

        All ranks of all islands decide alike: by the largest of what they have.
        """
        needed = 0.0
        if line is not None:
            needed = max(gather_number(line, time.monotonic() - start)) + more * took + 2 * rtt
        return island.max(needed)[0] < seconds

    def send(size: int) -> float:
        """Seconds that a message of `size` bytes from each to all took, on the slowest rank."""
        if line is None:
            return 0.0
        data, begin = torch.zeros(size, dtype=torch.uint8, device="cpu"), time.monotonic()
        line.all_gather(data)
        seen = max(max(gather_number(line, time.monotonic() - begin)) - rtt / 2, 1e-6)
        rates.append(8 * size * (line.size - 1) / seen)
        return seen

    took = send(SIZES[0])  # the first message finds cold connections and code
    for size in SIZES:
        took = send(size)
        if not fits(4):
            break
    if fits(1):
        send(size)  # once more: the connections are beyond slow start now
    if line is None or not max(rates):
        return None
    return _rehearsed(line, max(rates), rtt)


def _rehearsed(peers: PeerGroup, rate: float, rtt: float) -> Link:
    """The measured link, bounded by the rehearsed one where there is one."""
    if peers.link is None:
        return Link(rate, rtt)
    limit = peers.link.bits_per_second
    return Link(min(rate, limit * TCP_SHARE) if limit else rate, rtt + peers.link.rtt)


UNLIKE = 1.5
"""From this ratio of their steps on islands are let take unlike ones; a few steps show no less."""

DIGITS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Leading digits to which rates and times are rounded: two measurements of one link mostly end in
the same step.
"""

SLOWEST_LAST = sorted(DEVICES, key=lambda name: (DEVICES[name].transformed, name))
"""Islands may have unlike devices, and choose for the slowest one."""


def coarse(value: float) -> float:
    """The nearest number that begins with one of `DIGITS`, by ratio; 0 stays 0.

    >>> coarse(94e6), coarse(0.0402)
    (100000000.0, 0.05)
    """
    if value <= 0:
        return 0.0
    decade = 10.0 ** math.floor(math.log10(value))
    nearest = min((*DIGITS, 10.0), key=lambda digit: abs(math.log(digit * decade / value)))
    return rounded(nearest * decade)


def rounded(value: float) -> float:
    """Three digits, as a person would write them: 0.3, not 0.30000000000000004."""
    return float(f"{value:.3g}")


def situation_of(exchange: Exchange, planned: AutoChoice) -> Situation:
    """The planner's situation of a run, with the link and the seconds of a step of a choice."""
    host, placed = exchange.host, exchange.channels[0].position
    return Situation(
        tensors(host),
        exchange.topology.islands,
        Link.parse(planned.link),
        planned.step_seconds,
        shards=placed.num_shards,
        device=device_name(host.device),
        steps=planned.steps,
    )


def unlike(
    islands: int, link: Link, device: str, fastest: float, slowest: float
) -> tuple[Machine, ...]:
    """The islands of a run whose steps take unlike seconds, as if all but one were the slowest;
    none where they are nearly alike, or not measured.
    """
    if not 0 < UNLIKE * fastest < slowest:
        return ()
    took = [coarse(fastest), *[coarse(slowest)] * (islands - 1)]
    return tuple(Machine(seconds, link=link, device=device) for seconds in took)


def tensors(host: TrainingHost) -> list[tuple[str, tuple[int, ...]]]:
    """Names and whole shapes of what is trained, each once."""
    return list({p.name: (p.name, p.global_shape) for p in host.params if not p.frozen}.values())


def chosen(situation: Situation, host: TrainingHost) -> Choice:
    """The planner's choice among the settings that keep the user's optimizer as it is. Raises
    ValueError: there is none.
    """
    kept = {name.lower() for name in host.optimizer_names}
    inner = kept.pop() if len(kept) == 1 else "muonadamw"
    inner = "adamw" if inner == "qhadamw" else inner  # it is defined for the same methods
    rows = plan_rows(situation, None, keep_inner=inner)
    fitting = [r for r in rows if r.config is None or (r.chosen and _fits(r.config, host))]
    return choose(fitting, situation, keep_inner=inner)


def _fits(config: ExchangeConfig, host: TrainingHost) -> bool:
    """Whether the method is defined for these optimizers, without a warning."""
    doubled = keeps_momentum(config) and any(
        group.get("betas", (0.0,))[0] for o in host.optimizers for group in o.param_groups
    )
    if doubled:
        return False
    try:
        check(config, host)
    except ValueError:
        return False
    return True


def device_name(device: torch.device) -> str:
    """The planner's name of a device; an unknown GPU counts as an H100."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().replace("geforce ", "").replace(" ", "-")
    return next((known for known in DEVICES if known in name), "h100")


def free_bytes(device: torch.device) -> float:
    """Bytes of a GPU that activations leave at their largest, in the measured steps; 0: unknown."""
    if device.type != "cuda":
        return 0.0
    whole = torch.cuda.get_device_properties(device).total_memory
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return 0.95 * whole - activations
