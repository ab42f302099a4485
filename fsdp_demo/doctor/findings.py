"""What is wrong, in words, from what was measured.

Each rule is a pure function of an `Examination`; its finding has a section in docs/doctor.md under
its name. Thresholds stand beside the rules that have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import local, paths, rates
from .finding import Finding
from .measured import Examination

RULES: dict[str, Callable[[Examination], Iterator[Finding]]] = {
    "wrong-interface": paths.wrong_interface,
    "unreachable": paths.unreachable,
    "one-sided-firewall": paths.one_sided_firewall,
    "mtu-black-hole": paths.mtu_black_hole,
    "stalled": paths.stalled,
    "not-measured": paths.not_measured,
    "open-files": local.open_files,
    "unlike-versions": local.unlike_versions,
    "port-100-mbit": rates.port_100_mbit,
    "window-limited": rates.window_limited,
    "slow-start-after-idle": rates.slow_start_after_idle,
    "packet-loss": rates.packet_loss,
    "unequal-links": rates.unequal_links,
    "unequal-islands": local.unequal_islands,
    "slow-disk": local.slow_disk,
    "clock-offset": local.clock_offset,
}
"""By the name of what they find, in the order of docs/doctor.md."""


def findings(seen: Examination) -> list[Finding]:
    """All that is wrong; what stops a run comes first."""
    found = [finding for rule in RULES.values() for finding in rule(seen)]
    return sorted(found, key=lambda finding: not finding.stops)
