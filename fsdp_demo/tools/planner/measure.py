"""The time of a step of the user's own script, without an exchange: it runs for some steps and is
stopped.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import counted

_SITE = """\
from {package} import install
install()
"""
PATIENCE = 600.0  # seconds without a result
GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def measured_step(
    script: Sequence[str], steps: int, tokens: float | None, patience: float = PATIENCE
) -> tuple[float, float | None, str]:
    """(median seconds of a step, `tokens`, where it is from).

    The script runs as one island, without the variables of a run (ISLAND_*), so that an exchange it
    attaches sends nothing. After some steps of its optimizer it is sent SIGTERM.

    Args:
        script: a command, as in ["torchrun", "--nproc-per-node", "2", "train.py"]; a first word
            that ends in .py runs under this interpreter.
        steps: to time, after a few that settle.

    Raises:
        ValueError: the script ended, or made no steps of a torch optimizer in time.
    """
    if steps < 2:
        raise ValueError(f"--measure-steps {steps}: 2 or more")
    words = [sys.executable, *script] if script[0].endswith(".py") else list(script)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        package = f"{__package__.partition('.')[0]}.commands.step_clock"
        (folder / "sitecustomize.py").write_text(_SITE.format(package=package), encoding="utf-8")
        env = {k: v for k, v in os.environ.items() if not k.startswith("ISLAND_")}
        root = str(Path(__file__).resolve().parents[3])
        paths = [name, *filter(None, [env.get("PYTHONPATH")]), root]
        env |= {"PYTHONPATH": os.pathsep.join(paths)}
        env |= {"FSDP_DEMO_CLOCK": name, "FSDP_DEMO_CLOCK_STEPS": str(steps)}
        try:
            child = subprocess.Popen(words, env=env, start_new_session=True, stdout=sys.stderr)
        except OSError as error:
            raise ValueError(f"{words[0]} could not be started: {error.strerror}") from None
        try:
            found = _wait(child, folder, patience)
            print("fsdp-demo: the steps are measured; the script is stopped now", file=sys.stderr)
        finally:
            _end(child)
    seconds = max(statistics.median(f["seconds"]) for f in found)
    return seconds, tokens, f"measured: the median of {counted(steps, 'step')} of {script[0]}"


def _wait(child: subprocess.Popen[bytes], folder: Path, patience: float) -> list[dict[str, Any]]:
    """What the ranks have written, a moment after the first of them."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        ended = child.poll() is not None
        if list(folder.glob("*.json")):
            time.sleep(0.5)
            return [json.loads(f.read_text(encoding="utf-8")) for f in folder.glob("*.json")]
        if ended:
            raise ValueError(
                f"the script ended with status {child.returncode} before enough steps of a torch "
                "optimizer: let it run for more steps, or give --measure-steps or --step-time"
            )
        time.sleep(0.1)
    raise ValueError(
        f"the script made too few steps of a torch optimizer in {patience:g} s: give --step-time"
    )


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the script's process group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, how)
        except ProcessLookupError:
            break
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            continue
        break
    child.wait()
