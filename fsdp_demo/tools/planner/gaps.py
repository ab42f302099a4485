"""The loss to expect against an all-reduce of gradients at every step, where somebody has measured
it, and how far that is from the user's case. Nothing is made up: no source, no number.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...config.schema import ExchangeConfig
from ...files import read_json

SMALL = 10e6
"""Below so many parameters our own study (0.49 to 3.3 M) is nearer than the papers, whose smallest
models have 35 M.
"""


def expected_gap(
    config: ExchangeConfig, parameters: int, islands: int
) -> tuple[dict[str, Any] | None, str]:
    """(gap, why there is none). A gap is {"percent": of the loss, "source": text, "extrapolated":
    text, empty within the source's range, "factor": how many times larger or smaller the model is
    than the nearest of the source, "period": the source's, where it is another; else None}.
    """
    if config.preset == "full":
        return gap(0.0, "the mean gradient of every step, as all-reduce"), ""
    period = max(c.schedule.sync_every for c in config.channels)
    if config.preset == "diloco" and parameters >= SMALL:
        return _diloco(parameters, islands, period), ""
    main = _data()["study"]
    name = config.preset
    if name == "demo" and config.inner_optimizers[:1] == ("adamw",):
        name = "demo adamw"
    phases = any(c.later for c in config.channels)
    sizes = main["phases"] if phases else (main, *main["larger"], *main["muon"])
    known = [main | s for s in sizes if name in s["difference"]]
    if not known:
        return None, f"nobody has compared {name!r}{' with phases' * phases} with an all-reduce"

    def distance(s: dict[str, Any]) -> tuple[float, float]:
        apart = parameters / s["parameters"], period / s["period"][name]
        return abs(math.log(apart[0])), abs(math.log(apart[1]))

    study = min(known, key=distance)
    difference = study["difference"][name]
    factor = parameters / study["parameters"]
    times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
    far = [
        f"measured at {study['parameters'] / 1e6:.2f} M parameters, this model has {times} times "
        "as many: read the order of those measured at one size, not the number"
    ] * (not 0.8 < factor < 1.25)
    if islands != study["islands"]:
        far.append(f"measured with {study['islands']} islands, not {islands}")
    percent, source = 100 * difference / study["loss"], f"{study['source']}, {study['date']}"
    return gap(percent, source, far, factor, _unlike(study["period"][name], period)), ""


def gap(
    percent: float,
    source: str,
    far: Sequence[str] = (),
    factor: float = 1.0,
    period: int | None = None,
) -> dict[str, Any]:
    """A gap as `expected_gap` returns it; `far`: how the source's case differs from the user's."""
    return {
        "percent": round(percent, 2),
        "source": source,
        "extrapolated": "; ".join(far),
        "factor": factor,
        "period": period,
    }


def _diloco(parameters: int, islands: int, period: int) -> dict[str, Any]:
    """Linear in log N and log M between the entries of the published table, else the edge."""
    table = _data()["diloco"]
    sizes = [float(n) for n in table["percent"]]
    rows = list(table["percent"].values())
    counts = table["islands"]
    percent = _between(parameters, sizes, [_between(islands, counts, row) for row in rows])
    far, factor = [], 1.0
    if not sizes[0] <= parameters <= sizes[-1]:
        edge = sizes[0] if parameters < sizes[0] else sizes[-1]
        factor = parameters / edge
        far.append(f"{factor:.2g} times the table's {edge:.3g} parameters, whose entry this is")
    if islands > counts[-1]:
        far.append(f"the table ends at {counts[-1]} islands, whose entry this is")
    return gap(percent, table["source"], far, factor, _unlike(table["period"], period))


def _unlike(there: int, here: int) -> int | None:
    return there if there != here else None


def _between(x: float, xs: list[float], ys: list[float]) -> float:
    """Linear in log x; the first or last y outside."""
    if x <= xs[0]:
        return ys[0]
    if x >= xs[-1]:
        return ys[-1]
    i = bisect.bisect_right(xs, x)
    share = math.log(x / xs[i - 1]) / math.log(xs[i] / xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = read_json(Path(__file__).parent / "gaps.json")
    return found
