"""The model card (README.md) of an exported folder: what was trained, how, at what cost in bytes,
and which parameters these are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from ...errors import counted, size
from ...tools.inspect import above, listed, of_islands, ranks, settings
from ...version import __version__


def write_card(
    out: Path, chosen: Any, run: Path, model: Any, tokenizer: bool, repository: str | None
) -> None:
    """Write README.md into `out`. `chosen` is `pretrained.Chosen`; numbers that the run did not
    record are left out.
    """
    name = repository or out.resolve().name
    front = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["fsdp-demo", chosen.config.preset],
    }
    head = chosen.parts[0][1].heads[0]
    rows = [f"| {label} | {value} |" for label, value in _rows(chosen, run, model, head)]
    bare = "" if tokenizer else "No tokenizer was saved with the run: the folder holds none.\n\n"
    text = f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {name}

{type(model).__name__} of {sum(p.numel() for p in model.parameters()):,} parameters, trained by fsdp-demo, in its last start on {counted(head["islands"], "island")}.

| | |
|---|---|
{chr(10).join(rows)}

{bare}```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{repository or out.name}")
```

The whole configuration of the exchange:

```yaml
{chosen.config.to_yaml()}```
"""  # noqa: E501
    (out / "README.md").write_text(text, encoding="utf-8")


def _rows(chosen: Any, run: Path, model: Any, head: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import transformers

    yield "method", chosen.config.describe()
    changed = ", ".join(f"{key}={value}" for key, value in settings(chosen.config).items())
    yield "settings", changed or "those of the preset"
    yield "islands", f"{head['islands']} in the last start, each of {ranks(head)}"
    yield "parameters", chosen.says
    yield "step", chosen.step
    yield from _counted(chosen)
    sent = chosen.parts[0][1].outline(head["rank"], head["island"]).last.values()
    shown = numbers(
        chosen.parts[0][0], run, chosen.step, ended=all(at == chosen.step for at in sent)
    )
    if chosen.kind == "replica":  # what was evaluated is the mean
        shown.pop("evaluation loss", None)
    yield from shown.items()
    yield "dtype", str(next(model.parameters()).dtype).removeprefix("torch.")
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    yield (
        "versions",
        f"trained with fsdp-demo {head['package']}, torch {head['torch']}; exported with "
        f"{__version__}, {libraries}",
    )


def _counted(chosen: Any) -> Iterator[tuple[str, str]]:
    """Tokens that the loop told the exchange (`report`), of the islands that the run holds at this
    step, and of which ones: those that took part only in earlier starts are not among them.
    """
    tokens, islands = 0, set()
    for saved in {saved.folder: saved for saved in chosen.seen}.values():
        tokens += sum(saved.outline(rank, island).tokens for island, rank in saved.paths)
        islands |= set(saved.islands)
    if tokens:
        lost = set(range(chosen.seen[0].heads[0]["islands"])) - islands
        several = (
            f"islands {listed(lost)} hold" if len(lost) > 1 else f"island {listed(lost)} holds"
        )
        without = f"; {several} no step {chosen.step}" if lost else ""
        from_when = ", each since it began, joined or took over" if len(islands) > 1 else ""
        yield "tokens", f"{tokens:,}, {of_islands(islands)}{from_when}{without}"


def numbers(folder: Path, run: Path, step: int, ended: bool) -> dict[str, str]:
    """Losses and bytes at `step` as the Trainer or recipes/pretrain.py logged them, from the
    checkpoint up to the run's folder.

    ended: every channel has sent after this step, so that what was evaluated at the end of the run
    is what the checkpoint holds.
    """
    found: dict[str, Any] = {}
    for place in above(folder, run):
        if (state := place / "trainer_state.json").is_file():
            found = _trainer(json.loads(state.read_text()), step) | found
        if (log := place / "metrics.jsonl").is_file():
            found = _recipe(log, place / "summary.json", step, ended) | found
    labels = {
        "global_loss": "training loss, all islands",
        "loss": "training loss, one island",
        "eval_loss": "evaluation loss",
    }
    out = {
        label: f"{found[key]:.4f}" for key, label in labels.items() if found.get(key) is not None
    }
    if found.get("bytes_sent"):
        exchanges = int(found.get("exchanges", 0))
        out["bytes sent by an island"] = size(found["bytes_sent"]) + (
            f" in {counted(exchanges, 'exchange')}" if exchanges else ""
        )
    return out


def _trainer(state: dict[str, Any], step: int) -> dict[str, Any]:
    names = {
        "loss": "loss",
        "exchange/loss": "global_loss",
        "exchange/bytes_sent": "bytes_sent",
        "exchange/exchanges": "exchanges",
    }
    out: dict[str, Any] = {}
    for row in state.get("log_history", []):
        if row.get("step", 0) <= step:
            out |= {name: row[key] for key, name in names.items() if key in row}
        if row.get("step") == step and "eval_loss" in row:
            out["eval_loss"] = row["eval_loss"]
    return out


def _recipe(log: Path, summary: Path, step: int, ended: bool) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        if row["step"] <= step:
            out = {key: row.get(key) for key in ("loss", "global_loss", "bytes_sent")}
    if summary.is_file():
        data = json.loads(summary.read_text())
        evaluated = [
            loss
            for at, loss, _ in data.get("validation", ())  # the Trainer logs its own
            if at == step and (ended or at < data["steps"])
        ]
        out |= {"eval_loss": evaluated[-1]} if evaluated else {}
        out |= (
            {"bytes_sent": data["bytes_sent_per_island"], "exchanges": data.get("exchanges", 0)}
            if data["steps"] == step
            else {}
        )
    return out
