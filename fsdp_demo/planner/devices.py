"""What devices take for the work of an exchange, and how fast they train where nobody has measured
it.

The times of a CPU are measured (docs/results.md); those of GPUs are arithmetic, from bytes that
are read and written over the memory's rate, and say so. A user's own come with
`--compression-time`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config.parsing import nearest


@dataclass(frozen=True)
class Device:
    """One rank's processor.

    Attributes:
        dense, sparse, transformed: seconds per value of the rank's shards in an exchange, of what is
            sent whole, of what is selected from, and of what is selected from behind a transform;
            reading, coding, decoding and applying together.
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


_ARITHMETIC = "arithmetic: bytes moved over the memory's rate; never measured"


def _gpu(tera: float, terabytes: float, gigabytes: float) -> Device:
    """A GPU of so many TFLOP/s in dense bf16, TB/s and GB (the makers' data sheets).

    At 0.8 of the memory's rate, in plain torch: 28 B per value sent whole, 40 B where something is
    selected, 68 B behind a transform (as counted for docs/performance.md). A message takes 1500
    launches of 4 microseconds. A byte that moves takes 0.6 ns of a host's core.
    """
    rate = 0.8e12 * terabytes
    return Device(
        28 / rate, 40 / rate, 68 / rate, 6e-3, 0.6e-9, 1e12 * tera, 0.4, 1e9 * gigabytes,
        _ARITHMETIC,
    )  # fmt: skip


DEVICES: dict[str, Device] = {
    "cpu": Device(
        11.4e-9, 4.9e-9, 9.0e-9, 3e-3, 5.3e-9, 90e9, 0.5, 0.0,
        "measured on one core of an Intel Xeon with AVX-512, 2026-11-23 (step.py, codec.py, "
        "slow_link.py)",
    ),
    "b200": _gpu(2250, 8.0, 180),
    "gh200": _gpu(989, 4.0, 96),
    "h200": _gpu(989, 4.8, 141),
    "h100": _gpu(989, 3.35, 80),
    "a100": _gpu(312, 2.0, 80),
    "l40s": _gpu(362, 0.86, 48),
    "l4": _gpu(121, 0.3, 24),
    "a10g": _gpu(70, 0.6, 24),
    "rtx-4090": _gpu(165, 1.0, 24),
    "rtx-3090": _gpu(71, 0.94, 24),
}  # fmt: skip
"""Name -> device. FLOPs: NVIDIA's data sheets, as in recipes/report.py."""


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
