"""Each fault that `fsdp-demo doctor` names, provoked once between two islands in a network lab. Needs
Linux and root.

    python benchmarks/doctor_lab.py --json benchmarks/figures/doctor.json   # all, some six minutes
    python benchmarks/doctor_lab.py --only mtu-black-hole,none

Islands are network namespaces (`network_lab.py`). For each fault the lab is built anew, the fault
is put into it, `fsdp-demo doctor` runs on both nodes, and its findings are compared with the fault.
The status is 1 where one was not named.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from report import table  # noqa: E402

from benchmarks.doctor_faults import FAULTS, ROOT, Call, Fault, FaultyLab, ahead, join  # noqa: E402
from benchmarks.network_lab import PORT, LabError, missing  # noqa: E402

LIMIT = 480.0  # seconds that one examination may take


def examine(fault: Fault, seconds: float) -> dict[str, Any]:
    """Build the lab with a fault and run the command; what it wrote, with its statuses."""
    lab = FaultyLab()
    with ExitStack() as around:
        group = around.enter_context(ahead())  # left after `down` has emptied it
        around.callback(lab.down)
        lab.up()
        lab.shape(fault.rate, fault.delay)
        fault.put(lab)
        folder = Path(around.enter_context(tempfile.TemporaryDirectory()))
        lab.lines_join(group)
        return _run(lab, fault, seconds, folder, group)


def _run(
    lab: FaultyLab, fault: Fault, seconds: float, folder: Path, group: Path | None
) -> dict[str, Any]:
    endpoint = f"{lab.address(0)}:{PORT}"
    command = [sys.executable, "-m", "fsdp_demo.cli"]
    store = [*command, "store", "--bind", endpoint, "--file", str(folder / "store"), "--quiet"]
    serving = lab.popen(0, store, preexec_fn=partial(join, group))
    started, islands, around = time.monotonic(), [], ExitStack()
    try:
        for i in range(lab.nodes):
            env = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "ISLAND_ENDPOINT": endpoint,
                "ISLAND_COUNT": str(lab.nodes),
                "ISLAND_RANK": str(i),
                "ISLAND_ADDRESS": fault.address if i and fault.address else lab.address(i),
                "ISLAND_TIMEOUT": "300",
                "OMP_NUM_THREADS": "1",
            }
            words = [*command, "doctor", "--seconds", str(seconds), *fault.words[i]]
            words += ["--json", str(folder / "doctor.json")]
            call = Call(tuple(words), env, group=group)
            if i:
                call = around.enter_context(fault.machine(call, folder))
            islands.append(
                lab.popen(
                    i,
                    list(call.words),
                    env=call.env,
                    cwd=call.cwd,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    preexec_fn=partial(join, call.group),
                )
            )
        said = [island.communicate(timeout=LIMIT)[0] for island in islands]
    finally:
        for process in [*islands, serving]:
            process.kill()
            process.wait()
        around.close()
    if not (folder / "doctor.json").exists():
        raise LabError(f"doctor wrote nothing: {said[0].strip() or said[1].strip()}")
    found = json.loads((folder / "doctor.json").read_text())
    found["statuses"] = [island.returncode for island in islands]
    found["alike"] = _findings(said[0]) == _findings(said[1])
    found["seconds"] = time.monotonic() - started
    return dict(found)


def _findings(text: str) -> str:
    return text.partition("\nFindings\n")[2]


def row(name: str, fault: Fault, found: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    names = [one["name"] for one in found["findings"]]
    right = [f for f in found["findings"] if f["name"] == fault.finding]
    says = next((f["says"] for f in right if fault.about in f["says"]), "")
    return {
        "fault": name,
        "done": fault.says,
        "wanted": fault.finding,
        "named": bool(says) if fault.finding else not names,
        "others": sorted({one for one in names if one != fault.finding}),
        "says": says,
        "status": max(found["statuses"]),
        "alike": found["alike"],
        "seconds": round(found["seconds"], 1),
        "link": found["link"],
    }


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The table."""
    head = ["fault", "done", "named", "others", "status", "says"]
    cells = [
        [
            r["fault"],
            r["done"],
            "yes" if r["named"] else "NO",
            ", ".join(r["others"]) or "-",
            str(r["status"]),
            r["says"] or "-",
        ]
        for r in rows
    ]
    return table([head, *cells])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="FAULTS", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--seconds", type=float, default=12.0, help="for the links (default: 12)")
    parser.add_argument("--json", metavar="FILE", help="write the rows into this file")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        parser.error(f"--only {', '.join(unknown)}: allowed are {', '.join(FAULTS)}")
    if why := missing():
        parser.error(why)
    rows, started = [], time.monotonic()
    for name in names:
        rows.append(row(name, FAULTS[name], examine(FAULTS[name], args.seconds)))
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if args.json:  # what is there stays there if the next one fails
            Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(show(rows))
    return int(not all(r["named"] and r["alike"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
