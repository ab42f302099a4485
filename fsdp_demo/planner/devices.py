"""What devices take for the work of an exchange, and how fast they train where nobody has measured
it.

The times of a CPU are measured (`recipes/benchmarks/planner_times.py`; of a message:
`slow_link.py`, demo without a limit); those of GPUs are arithmetic, from bytes that are read and
written over the memory's rate, and say so, and how far they were off on an H100. A user's own come
with `--compression-time`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.parsing import nearest


@dataclass(frozen=True)
class Device:
    """One rank's processor.

    Attributes:
        dense, sparse, transformed: seconds per value of the rank's shards in an exchange: of what
            is sent whole, of what is selected from, and of what is selected from behind a
            transform; reading, coding, decoding and applying together.
        message: seconds of a message, whatever its size.
        per_byte: seconds of the host per byte that a rank sends and receives at once: copies,
            checksums, sums, the kernel.
        flops: dense bf16, per second; 0 if unknown. mfu: share of them that training reaches, a
            guess.
        memory: bytes; 0 if unknown.
        source: where the times are from.
    """

    dense: float
    sparse: float
    transformed: float
    message: float
    per_byte: float
    flops: float
    mfu: float
    memory: float
    source: str


PEAK = {
    "B200": 2250,
    "GH200": 989,
    "H200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "A100": 312,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "RTX 6000 Ada": 364,
    "RTX 4090": 165,
    "RTX 3090": 71,
}
"""Dense bf16 with fp32 sums, 1e12 per second; the first name found in the GPU's name counts.
Source: NVIDIA's data sheets of each, and for Ada and Ampere GeForce the architecture white papers'
appendices.
"""

PER_BYTE = 2.5e-9
"""Seconds of a host's core per byte that is sent, and received at once: copies, checksums, sums in
fp32, the kernel (planner_times.py, as for the CPU below)."""

_ARITHMETIC = (
    "arithmetic: bytes moved over the memory's rate; sparse presets took 3 to 7 times as long on "
    "an H100 (docs/performance.md)"
)


def _gpu(name: str, terabytes: float, gigabytes: float) -> Device:
    """A GPU of so many TB/s and GB (the makers' data sheets).

    At 0.8 of the memory's rate, in plain torch, by our count: 28 B per value sent whole, 40 B where
    something is selected, 68 B behind a transform. A message takes 1500 launches of 4 microseconds.
    """
    rate = 0.8e12 * terabytes
    return Device(
        28 / rate, 40 / rate, 68 / rate, 6e-3, PER_BYTE, 1e12 * PEAK[name], 0.4, 1e9 * gigabytes,
        _ARITHMETIC,
    )  # fmt: skip


DEVICES: dict[str, Device] = {
    "cpu": Device(
        5.4e-9, 7.4e-9, 13.4e-9, 5e-3, PER_BYTE, 90e9, 0.5, 0.0,
        "processor time of one of two shared cores of an AMD EPYC, 2026-11-23 (planner_times.py)",
    ),
    "b200": _gpu("B200", 8.0, 180),
    "gh200": _gpu("GH200", 4.0, 96),
    "h200": _gpu("H200", 4.8, 141),
    "h100": _gpu("H100", 3.35, 80),
    "a100": _gpu("A100", 2.0, 80),
    "l40s": _gpu("L40S", 0.86, 48),
    "l4": _gpu("L4", 0.3, 24),
    "a10g": _gpu("A10G", 0.6, 24),
    "rtx-4090": _gpu("RTX 4090", 1.0, 24),
    "rtx-3090": _gpu("RTX 3090", 0.94, 24),
}  # fmt: skip
"""Name -> device."""


def device(name: str) -> Device:
    """The device of that name.

    Raises:
        ValueError: it is not in the table; offers the nearest.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        raise ValueError(
            f"--device {name!r} is not known: allowed are {', '.join(DEVICES)}"
            f"{nearest(name.lower(), list(DEVICES))}"
        )
    return found


def guessed_step(parameters: int, tokens: float, ranks: int, of: Device) -> float:
    """Seconds of a step of `tokens` tokens on an island of `ranks` devices: 6 FLOPs per parameter
    and token, at the device's guessed MFU. Attention is left out.
    """
    return 6.0 * parameters * tokens / (ranks * of.flops * of.mfu)
