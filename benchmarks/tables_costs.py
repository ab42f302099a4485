"""Tables of what a step costs: bytes, memory, compression, the start, ZeRO."""

from __future__ import annotations

from figure_cells import Rows, cell

from benchmarks.kept import load

HOT = {  # rows of codec.json
    "k8": "k = 8",
    "k32": "k = 32",
    "k8_bf16": "k = 8, `codec.transform_precision: bf16`",
    "k32_bf16": "k = 32, `codec.transform_precision: bf16`",
    "plain_k8": "no transform, k = 8",
    "plain_k64": "no transform, k = 64",
}


def published() -> Rows:
    """What papers say that they send, against this library."""
    head = ["claim", "published", "by its own format", "here"]
    rows = []
    for claim in load("published.json")["published"]:
        unit, text = claim["unit"], claim["published"].partition(" [")[0]
        here = (_figure(claim[key], unit) for key in ("by_format", "ours"))
        rows.append([claim["claim"], text, *here])
    return [head, *rows]


def memory() -> Rows:
    """What each preset takes on a rank: bytes per parameter, and GB."""
    head = [
        "preset",
        "inner state",
        "exchange",
        "offloaded: GPU + host",
        "workspace",
        "offloaded: workspace",
        "messages",
    ]
    rows = []
    for entry in load("memory.json"):
        here, host = entry["here"], entry["host"]
        of = here["parameters"]
        kept = [_kept(here, "device"), _kept(host, "device"), _kept(host, "host")]
        needs = (here["device_workspace"], host["device_workspace"], host["host_workspace"])
        rows.append(
            [
                f"`{entry['preset']}`",
                f"{entry['inner']} {_share(entry['inner_state'], of)}",
                _share(kept[0], of),
                f"{_share(kept[1], of)} + {_share(kept[2], of)}",
                *(_share(count, of) for count in needs),
            ]
        )
    return [head, *rows]


def positions() -> Rows:
    """Bytes and times of positions, as `benchmarks/positions.py --json` wrote them."""
    codes = ("int8", "2bit", "1bit")
    head = ["k of 4096", "bits", "Rice, random", "Rice, chosen", *(f"bytes, {c}" for c in codes)]
    rows = [[*head, "ns, 12 bits", "ns", "ratio", "ratio with values"]]
    for r in load("positions.json")["rows"]:
        ns, bits = r["ns"], [r[key] for key in ("bits", "rice_uniform", "rice_chosen")]
        cells = [f"{b:.2f}" for b in bits] + [f"{r['bytes'][c]:.3f}" for c in codes]
        times = [f"{ns['encode' + v]:.1f} + {ns['decode' + v]:.1f}" for v in ("12", "")]
        ratios = [f"{r[key]:.2f}" for key in ("ratio", "ratio_with_values")]
        rows.append([str(r["k"]), *cells, *times, *ratios])
    return rows


def codec() -> Rows:
    """Compression beside its published form, as `benchmarks/codec.py --json` wrote it."""
    head = ["", "published form", "ours", "ratio", "bytes per coefficient", "same coefficients"]
    memory = "temporaries, MB: published (largest tensor) / ours (all)"
    rows, found = [[*head, "residual off by", memory]], load("codec.json")
    for name, words in HOT.items():
        r = found[name]
        cells = [
            cell(r.get("published_ns"), ".1f"),
            cell(r["ours_ns"], ".1f"),
            cell(r.get("ratio"), ".1f"),
            cell(r["bytes_per_coefficient"], ".2f"),
            cell(r.get("same_coefficients"), ".2%"),
            cell(r.get("residual_error"), ".0e"),
            f"{cell(r.get('published_temporaries_mb'), '.0f')} / {r['workspace_mb']:.0f}",
        ]
        rows.append([words, *cells])
    return rows


def codec_stages() -> Rows:
    """The same by stages, nanoseconds per element."""
    found, rows = load("codec.json"), []
    for name, words in HOT.items():
        r = found[name]
        if "published_stages_ns" in r and not name.endswith("bf16"):
            rows.append([f"{words}, published form", *_stages(r["published_stages_ns"])])
        rows.append([words, *_stages(r["stages_ns"])])
    return [["", *found["k8"]["stages_ns"]], *rows]


def scale() -> Rows:
    """Cost against size, tensors and replicas, as `benchmarks/scale.py --json` wrote it."""
    found = load("scale.json")["rows"]
    stages = ["momentum, transform", "selection, codes, residual", "decode, gradient", "apply"]
    rows = [["", "elements", "tensors", "replicas", *stages, "all"]]
    for r in found:
        facts = [r["name"], f"{r['elements']:,}", f"{r['tensors']:,}", str(r["replicas"])]
        rows.append([*facts, *_stages({s: r[s] for s in (*stages, "all")})])
    return rows


def drop() -> Rows:
    """DropCompute, as `benchmarks/drop.py --json` wrote it."""
    from benchmarks import drop as program

    rows = [program.HEAD]
    for kind in load("drop.json")["rows"]:
        facts = [kind["islands"], str(kind["seed"])]
        rows += [[*facts, *row] for row in program.rows_of(kind["cells"])]
    return rows


def idle() -> Rows:
    """A step in which no channel acts: microseconds in the exchange, by ranks and tensors."""
    found = load("idle.json")
    rows = [["ranks of the island", "tensors", "before, median us", "median us"]]
    for now, then in zip(found["rows"], found["before"], strict=True):
        assert (now["ranks"], now["tensors"]) == (then["ranks"], then["tensors"])
        figures = [f"{r['median']:.1f}" for r in (then, now)]
        rows.append([str(now["ranks"]), f"{now['tensors']:,}", *figures])
    return rows


def formats() -> Rows:
    """Number formats of values, as `benchmarks/number_formats.py --json` wrote them."""
    head = ["format", "bits per value", "error, Gaussian", "error, t3", "encode, ns", "decode, ns"]
    rows = [head]
    for r in load("formats.json")["codes"]:
        figures = [f"{r[key]:.4f}" for key in ("error_gaussian", "error_heavy")]
        times = [f"{r[key]:.2f}" for key in ("ns_encode", "ns_decode")]
        rows.append([r["code"], f"{r['bits']:.4g}", *figures, *times])
    return rows


def step() -> Rows:
    """A whole step with a message, as `benchmarks/step.py --json` wrote it."""
    head = ["", "preset", "step alone, ms", "with the exchange", "of it in the hooks, ms"]
    rows = [[*head, "check for NaN and Inf, ms", "memory alone, MB", "more"]]
    for r in load("step.json")["rows"]:
        times = [f"{1e3 * r['alone']:.0f}", f"{r['busy'] / r['alone']:.2f} x"]
        times += [f"{1e3 * r['busy_hooks']:.0f}", f"{1e3 * r['looking']:.1f}"]
        memory = [f"{n / 1e6:.0f}" for n in (r["bytes_alone"], r["bytes"] - r["bytes_alone"])]
        rows.append([r["setting"], f"`{r['preset']}`", *times, *memory])
    return rows


def zero_times() -> Rows:
    """Steps under ZeRO, as `benchmarks/zero.py --json` wrote them."""
    head = ["", "elements of a rank", "plain step, ms: wall, CPU", "not due: wall", "CPU"]
    head += ["in the exchange, ms", "plain again: wall", "CPU", "due: ns per element, CPU"]
    rows = [head]
    for r in load("zero.json")["times"]:
        wall, cpu = (1e3 * r[kind]["adamw"] for kind in ("wall", "cpu"))
        idle, again = (
            [f"{r[f'{clock}_adamw{what}']:+.1%}" for clock in ("wall", "cpu")]
            for what in (", not due", " again")
        )
        own = f"{1e3 * r['inside']:.2f} ({r['inside'] / r['cpu']['adamw']:.1%})"
        facts = [f"ZeRO-{r['stage']}", f"{r['held']:,}", f"{wall:.1f}, {cpu:.1f}"]
        rows.append([*facts, *idle, own, *again, f"{r['ns_per_element']:.0f}"])
    return rows


def zero_memory() -> Rows:
    """The most memory of a step under ZeRO, bytes per parameter of a rank."""
    rows = []
    for r in load("zero.json")["memory"]:
        figures = {
            key: value for key, value in r.items() if key not in ("stage", "parts", "largest")
        }
        head = ["most of a step, bytes per parameter", "masters", "largest", *figures]
        rows = rows or [[*head, "gradients held"]]
        cells = [f"{value:.2f}" for value in figures.values()]
        facts = [f"ZeRO-{r['stage']}", str(r["parts"]), f"{r['largest']:.0%}"]
        rows.append([*facts, *cells, f"{4 * (1 - r['largest']):.2f}"])
    return rows


def _figure(value: float, unit: str) -> str:
    return f"{value:.2f} MB" if unit == "MB" else f"{value:.1f} x"


def _kept(memory: dict[str, int], place: str) -> int:
    return memory[f"{place}_state"] + memory[f"{place}_flight"]


def _share(count: int, parameters: int) -> str:
    """Bytes per parameter, with GB in brackets."""
    return f"{count / parameters:.2f} ({count / 1e9:.2f})" if count else "0"


def _stages(found: dict[str, float]) -> list[str]:
    return [f"{ns:.2f}" for ns in found.values()]
