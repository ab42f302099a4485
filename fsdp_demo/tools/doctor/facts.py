"""What an island knows of itself: versions, interface, settings of TCP, speed of the disk."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from ...peers.header import VERSION as WIRE
from ...version import __version__

SYSCTL = Path("/proc/sys/net/ipv4")
NETWORK = Path("/sys/class/net")
BLOCK = 8 << 20  # bytes per write
_SIOCGIFADDR = 0x8915


def versions() -> dict[str, str]:
    """Of python, torch, fsdp_demo and the wire."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "unknown"
    return {
        "python": platform.python_version(),
        "torch": torch,
        "fsdp_demo": __version__,
        "wire": str(WIRE),
    }


def interface(address: str) -> str:
    """The interface that holds an address; "" where none does, or the system does not tell (no
    Linux).
    """
    for name, held in _addresses():
        if held == address:
            return name
    return ""


def _addresses() -> list[tuple[str, str]]:
    """(interface, address): one of IPv4 each, and all of IPv6."""
    if not sys.platform.startswith("linux"):
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            try:
                packed = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, packed)
                found.append((name, socket.inet_ntoa(answer[20:24])))
            except OSError:
                continue  # it has none
    try:
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            fields = line.split()
            found.append((fields[-1], socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))))
    except OSError:
        pass
    return found


def speed(name: str) -> int | None:
    """Mbit/s of an interface as its driver says; None where it does not (wireless, virtual)."""
    value = _number(NETWORK / name / "speed") if name else None
    return value if value is not None and value > 0 else None


def mtu(name: str) -> int | None:
    """Bytes of the packets of an interface."""
    return _number(NETWORK / name / "mtu") if name else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text().split()[-1])
    except (OSError, ValueError, IndexError):
        return None


def tcp_settings() -> dict[str, object]:
    """The fields of `measured.Island` that Linux keeps for TCP; empty values elsewhere."""
    try:
        congestion = (SYSCTL / "tcp_congestion_control").read_text().strip()
    except OSError:
        congestion = ""
    after_idle = _number(SYSCTL / "tcp_slow_start_after_idle")
    return {
        "congestion": congestion,
        "slow_start_after_idle": None if after_idle is None else bool(after_idle),
        "rmem": _number(SYSCTL / "tcp_rmem"),
        "wmem": _number(SYSCTL / "tcp_wmem"),
    }


def disk_mb_s(folder: str | Path, size: int = 256 << 20, seconds: float = 3.0) -> float:
    """MB/s (1e6 bytes) at which a file is written into a folder and reaches the disk (fsync). The
    file is removed.

    Args:
        size: bytes at most. seconds: after which no more is written.

    Raises:
        ValueError: the folder is missing, or cannot be written.
    """
    block, written = memoryview(os.urandom(BLOCK)), 0
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="fsdp-demo-doctor-") as file:
            start = time.perf_counter()
            while written < size and time.perf_counter() - start < seconds:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return written / 1e6 / (time.perf_counter() - start)
    except OSError as error:
        raise ValueError(
            f"--folder {folder}: no file can be written there ({error.strerror or error}); give "
            "the folder of the checkpoints"
        ) from None
