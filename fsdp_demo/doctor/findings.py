"""What is wrong, in words, from what was measured.

Each rule is a pure function of an `Examination`; its finding has a section in docs/doctor.md under
its name. Thresholds stand beside the rules that have them. Here are those about the islands
themselves: speed of steps and disks, versions, clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..comm.descriptors import cure
from . import paths, rates
from .measured import Examination, Finding

STEPS = 1.15  # the slowest step takes so many times the fastest
DISK = 50.0
"""MB/s. A checkpoint of a rank with 1e9 parameters (weights and AdamW in fp32, 12 GB) takes four
minutes at that."""

CLOCK = 5000.0  # ms


def unequal_islands(seen: Examination) -> Iterator[Finding]:
    """One island takes longer for a step: the others wait for it at each exchange."""
    took = {i.island: i.step_seconds for i in seen.islands if i.step_seconds}
    if len(took) < 2:
        return
    slow, fast = max(took, key=lambda i: took[i]), min(took, key=lambda i: took[i])
    if took[slow] < STEPS * took[fast]:
        return
    waits = 100 * (1 - took[fast] / took[slow])
    yield Finding(
        "unequal-islands",
        f"a step takes {took[slow]:.3g} s on {seen.label(slow)} and {took[fast]:.3g} s on "
        f"{seen.label(fast)}, which so waits {waits:.0f} % of the time",
        f"look at what else runs on {seen.label(slow)} (nvidia-smi, top), at its clocks and "
        "threads; or give it a smaller batch",
    )


def open_files(seen: Examination) -> Iterator[Finding]:
    """A rank may not open as many connections as there may be: it does not start."""
    for island in seen.islands:
        has, needs = island.open_files, island.open_files_needed
        if has is not None and needs is not None and has < needs:
            yield Finding(
                "open-files",
                f"{island.label} allows {has:,} open files in a process, and a rank needs up to "
                f"{needs:,}",
                cure(needs),
                stops=True,
            )


def slow_disk(seen: Examination) -> Iterator[Finding]:
    """Checkpoints are written slowly: training stands still meanwhile."""
    for island in seen.islands:
        if island.disk_mb_s is not None and island.disk_mb_s < DISK:
            yield Finding(
                "slow-disk",
                f"{island.label} writes {island.disk_mb_s:.1f} MB/s to its disk: 10 GB of "
                f"checkpoint take {10e3 / max(island.disk_mb_s, 1e-3) / 60:.0f} minutes",
                "write checkpoints to a local disk (--folder says which one is measured), or "
                "fewer of them",
            )


def unlike_versions(seen: Examination) -> Iterator[Finding]:
    """Islands have other releases. Another wire or fsdp_demo stops the run, others change bits."""
    for what in ("fsdp_demo", "wire", "torch", "python"):
        has = {i.label: i.versions.get(what, "unknown") for i in seen.islands}
        if len(set(has.values())) < 2:
            continue
        stops = what in ("fsdp_demo", "wire")
        yield Finding(
            "unlike-versions",
            f"{what} differs: " + ", ".join(f"{label} has {has[label]}" for label in has),
            "install one release everywhere"
            + ("" if stops else ": islands with others may differ in the last bit"),
            stops=stops,
        )


def clock_offset(seen: Examination) -> Iterator[Finding]:
    """Clocks differ by seconds: times in logs and files cannot be compared."""
    for (i, j), found in sorted(seen.directions.items()):
        off = found.clock_offset_ms
        if i < j and off is not None and abs(off) > CLOCK:
            yield Finding(
                "clock-offset",
                f"the clock of {seen.label(j)} is {abs(off) / 1e3:.1f} s "
                f"{'ahead of' if off > 0 else 'behind'} that of {seen.label(i)}",
                "let both follow a time server (timedatectl set-ntp true)",
            )


RULES: dict[str, Callable[[Examination], Iterator[Finding]]] = {
    "wrong-interface": paths.wrong_interface,
    "unreachable": paths.unreachable,
    "one-sided-firewall": paths.one_sided_firewall,
    "mtu-black-hole": paths.mtu_black_hole,
    "stalled": paths.stalled,
    "not-measured": paths.not_measured,
    "open-files": open_files,
    "unlike-versions": unlike_versions,
    "port-100-mbit": rates.port_100_mbit,
    "window-limited": rates.window_limited,
    "slow-start-after-idle": rates.slow_start_after_idle,
    "packet-loss": rates.packet_loss,
    "unequal-links": rates.unequal_links,
    "unequal-islands": unequal_islands,
    "slow-disk": slow_disk,
    "clock-offset": clock_offset,
}
"""By the name of what they find, in the order of docs/doctor.md."""


def findings(seen: Examination) -> list[Finding]:
    """All that is wrong; what stops a run comes first."""
    found = [finding for rule in RULES.values() for finding in rule(seen)]
    return sorted(found, key=lambda finding: not finding.stops)
