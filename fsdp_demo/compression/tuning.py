"""The fastest form of compression on the CPU at hand: tried once, in a fifth of a second, and kept.

`machine.Form` says what may be chosen. A form must give the bits of the default one on random
blocks, or it is left out; `products` alone may differ, since it is about what this rank selects.
What was found is kept in a file of the user's cache for the next process, by processor, torch and
block size.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ..config.channel import BLOCK, Codec
from .blocks import Layout
from .machine import (
    LIBRARIES,
    PARTS,
    SELECTIONS,
    Form,
    cache_folder,
    cpu_name,
    default,
    form,
    kernels,
    use,
    wanted,
)
from .topk import kernel, top_k
from .transform import MATRICES, Transform
from .windows import ContiguousViews

log = logging.getLogger("fsdp_demo")

SHAPE, KEPT = (256, 2048), 8
"""Of the gradient on which forms are tried: 128 blocks, 2 MiB; and coefficients kept of each."""
LEAST = 1024
"""Blocks of a workspace from which on it is worth while."""
ROUNDS = 3
CLEARLY = 0.95
"""What a form must take of the time of the best so far: machines are busy with other things, too.
"""
MARGIN = 0.9
"""What other products must take of the time of fp32 ones to be worth their error."""

_LOCK = threading.Lock()
_tuned: set[bool] = set()  # whether products in bf16 were tried


def pays(layout: Layout, codec: Codec, device: torch.device) -> bool:
    """Whether the work is done on a CPU, and is so much that the trial is soon made up for."""
    return device.type == "cpu" and codec.sparse and layout.num_blocks >= LEAST


def tune(products: str = "fp32") -> Form:
    """Let the fastest form be that of this process, unless ISLAND_TUNING says which.

    Args:
        products: those that the codec asks for; under "bf16" it is also tried whether they pay.

    Raises:
        ValueError: ISLAND_TUNING is not understood.
    """
    low = products == "bf16"
    with _LOCK:
        if low in _tuned:
            return form()
        if (said := wanted()) is not None:
            use(said)
        else:
            _find(low)
        _tuned.update({False, low})
        return form()


def forget() -> None:
    """Tune anew when asked again (for tests)."""
    with _LOCK:
        _tuned.clear()
        use(None)


def _find(low: bool) -> None:
    """Use what the file says, or measure, write it down and say so."""
    file = cache_file(low)
    found, began = _read(file, low), time.perf_counter()
    if found is not None:
        use(found)
        log.info("compression on this CPU: %s (from %s)", found, file)
        return
    found, took = measure(low)
    use(found)
    _write(file, found, low)
    spent = 1e3 * (time.perf_counter() - began)
    said = "compression on this CPU (%s): %s, tried in %.0f ms; ns per element: %s"
    tried = "; ".join(f"{ns:.2f} {f}" for f, ns in sorted(took.items(), key=lambda t: t[1]))
    log.info(said, cpu_name(), found, spent, tried)


# ---- measuring ---------------------------------------------------------------------------------


def measure(low: bool) -> tuple[Form, dict[Form, float]]:
    """The best form, and nanoseconds per element of those that were tried with products in fp32.

    One thing is varied at a time, from the best so far. The form of this process stays.

    Args:
        low: also whether products in bf16 pay.
    """
    before, took, best = form(), dict[Form, float](), _Trial(default())
    try:
        bits = best.bits()
        for others in (_libraries, _reading, _selections, _parts):
            trials = [best, *(t for t in map(_Trial, others(best.form)) if t.equal(bits))]
            took |= _timed(trials)
            fastest = min(trials, key=lambda t: took[t.form])
            if took[fastest.form] < CLEARLY * took[best.form]:
                best = fastest
        chosen = best.form
        if low:
            forms = [replace(chosen, products=p) for p in ("fp32", "bf16")]
            found = _timed([_Trial(f, "bf16") for f in forms])
            chosen = forms[found[forms[1]] < MARGIN * found[forms[0]]]
    finally:
        use(before)
    return chosen, took


def _libraries(f: Form) -> list[Form]:
    return [replace(f, library=x) for x in LIBRARIES if x != f.library]


def _reading(f: Form) -> list[Form]:
    return [replace(f, strided=not f.strided)]


def _selections(f: Form) -> list[Form]:
    return [
        replace(f, selection=x) for x in SELECTIONS if x != f.selection and (x != "c" or kernel())
    ]


def _parts(f: Form) -> list[Form]:
    return [replace(f, part=p) for p in PARTS if p != f.part]


def _timed(trials: Sequence[_Trial]) -> dict[Form, float]:
    """Nanoseconds per element of each, the least of rounds in which all take turns."""
    took = dict.fromkeys((t.form for t in trials), float("inf"))
    for _ in range(ROUNDS):
        for t in trials:
            began = time.thread_time_ns()
            t.run()
            took[t.form] = min(took[t.form], (time.thread_time_ns() - began) / t.work.numel())
    return took


class _Trial:
    """One replica's work on a gradient, in one form; with products in bf16 what it sends only."""

    def __init__(self, tried: Form, products: str = "fp32"):
        self.form, self.products = tried, products
        use(tried)
        self.layout = Layout([SHAPE], ["transform"])
        self.windows = self.layout.windows("cpu")
        generator = torch.Generator().manual_seed(0)
        self.gradient = torch.rand(
            SHAPE, generator=generator, dtype=torch.float32, device="cpu"
        ).sub_(0.5)
        self.work = torch.rand(
            self.layout.numel, generator=generator, dtype=torch.float32, device="cpu"
        ).sub_(0.5)

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        """Accumulate, select, and transform back; what came out."""
        use(self.form)
        with (
            ContiguousViews([self.gradient]) as memory,
            # all transforms cost alike
            Transform(next(iter(MATRICES)), "cpu", self.products) as made,
        ):
            for part in (part for w in self.windows for part in w.inner):
                work = part.of(self.work)
                if made.reads(part, memory):
                    made.add_from(part, memory, work, 0.999, 1.0)
                else:
                    x = part.pack(memory, made.room(part))
                    made.add(part.group, x, work, 0.999, 1.0)
            return [] if self.products == "bf16" else self._back(made)

    def _back(self, made: Transform) -> list[Tensor]:
        places, found = [], torch.zeros_like(self.work)
        for w in self.windows:
            blocks, out = w.of(self.work).view(-1, BLOCK), w.of(found).view(-1, BLOCK)
            places.append(top_k(blocks, KEPT))
            out.scatter_(1, places[-1], blocks.gather(1, places[-1]))
            for part in w.inner:
                made.inverse_(part.group, part.of(found))
        return [*places, found]

    def bits(self) -> list[Tensor]:
        """What comes out, and what is left."""
        return [*self.run(), self.work.clone()]

    def equal(self, bits: Sequence[Tensor]) -> bool:
        """Whether this form makes the same bits."""
        return all(map(torch.equal, self.bits(), bits))


# ---- the file ----------------------------------------------------------------------------------


def facts(low: bool) -> dict[str, object]:
    """What a measurement holds for."""
    return {
        "processor": f"{cpu_name()}, {kernels()}",
        "torch": torch.__version__,
        "block": BLOCK,
        "bf16": low,
        "version": 2,
    }


def cache_file(low: bool) -> Path:
    """Where it is remembered, in a folder that need not be there."""
    name = hashlib.sha256(json.dumps(facts(low), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder() / f"tuning-{name}.json"


def _read(file: Path, low: bool) -> Form | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Form(**found["form"]) if found["of"] == facts(low) else None
    except (OSError, KeyError, TypeError, ValueError):  # none, or not one of ours
        return None


def _write(file: Path, found: Form, low: bool) -> None:
    """Many ranks may do so at once: a file is whole or not there. A folder that cannot be written
    is no reason to stop."""
    text = json.dumps({"form": asdict(found), "of": facts(low)}, indent=1)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                out.write(text + "\n")
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        log.debug("the form of compression is not remembered in %s: %s", file, error)
