"""The model card (README.md) of an exported folder: what was trained, how, at what cost in bytes, and which parameters these are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from ..inspecting import settings, size
from ..version import __version__

KINDS = {
    "anchor": "the outer parameters (anchors), which all replicas share",
    "mean": "the mean over the replicas of all islands",
    "parameters": "those of every replica, which this method keeps equal",
    "replica": "those of island {island} alone, **not** the mean over the islands that the method calls its model",
}


def write_card(out: Path, chosen: Any, run: Path, model: Any, tokenizer: bool, repository: str | None) -> None:
    """Write README.md into `out`. `chosen` is `export.Chosen`; numbers that the run did not record are left out."""
    name = repository or out.resolve().name
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["fsdp-demo", chosen.config.preset]}
    head = chosen.parts[0][1].heads[0]
    rows = [f"| {label} | {value} |" for label, value in _rows(chosen, run, model, head)]
    bare = "" if tokenizer else "No tokenizer was saved with the run: the folder holds none.\n\n"
    text = f"""---
{yaml.safe_dump(front, sort_keys=False)}---

# {name}

{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters, trained on {head["islands"]} islands that exchange a
small part of what they learn ([fsdp-demo](https://pypi.org/project/fsdp-demo)).

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
"""
    (out / "README.md").write_text(text, encoding="utf-8")


def _rows(chosen: Any, run: Path, model: Any, head: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import transformers

    yield "method", chosen.config.describe()
    changed = ", ".join(f"{key}={value}" for key, value in settings(chosen.config).items())
    yield "settings", changed or "those of the preset"
    yield "islands", f"{head['islands']}, each in {head['shards']} shard(s) x {head['copies']} copies"
    yield "parameters", KINDS[chosen.kind].format(island=head["island"])
    yield "step", chosen.step
    yield from _counted(chosen)
    yield from numbers(chosen.parts[0][0].folder, run, chosen.step).items()
    yield "dtype", str(next(model.parameters()).dtype).removeprefix("torch.")
    yield "versions", f"fsdp-demo {head['version']}, exported by {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


def _counted(chosen: Any) -> Iterator[tuple[str, str]]:
    """Tokens that the loop told the exchange (`note`), as far as the exchange states at hand tell."""
    tokens, islands = 0, set()
    for _, saved in chosen.parts:
        for head in saved.heads:
            tokens += int(head["tokens"])
            islands.add(head["island"])
    if tokens:
        of = "" if len(islands) == chosen.parts[0][1].heads[0]["islands"] else f" (island {', '.join(map(str, sorted(islands)))} alone)"
        yield "tokens", f"{tokens:,}{of}"


def numbers(folder: Path, run: Path, step: int) -> dict[str, str]:
    """Losses and bytes at `step` as the Trainer or recipes/pretrain.py logged them, whichever is found from the checkpoint up to the run."""
    found: dict[str, Any] = {}
    for place in (folder, *folder.parents):
        if (state := place / "trainer_state.json").is_file():
            found = _trainer(json.loads(state.read_text()), step) | found
        if (log := place / "metrics.jsonl").is_file():
            found = _recipe(log, place / "summary.json", step) | found
        if place in (run, run.parent):
            break
    out = {label: f"{found[key]:.4f}" for key, label in (("loss", "training loss"), ("eval_loss", "evaluation loss")) if key in found}
    if found.get("bytes_sent"):
        out["bytes sent by an island"] = f"{size(found['bytes_sent'])} in {int(found.get('exchanges', 0)) or 'all'} exchanges"
    return out


def _trainer(state: dict[str, Any], step: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for row in state.get("log_history", []):
        if row.get("step", 0) <= step:
            out |= {key.removeprefix("exchange/"): value for key, value in row.items() if key != "exchange/loss"}
    return out


def _recipe(log: Path, summary: Path, step: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for line in log.read_text().splitlines():
        row = json.loads(line)
        if row["step"] <= step:
            out = {"loss": row["loss"], "bytes_sent": row["bytes_sent"]}
    if summary.is_file():
        data = json.loads(summary.read_text())
        evaluated = [loss for at, loss, _ in data["validation"] if at == step]
        out |= {"eval_loss": evaluated[-1]} if evaluated else {}
        out |= {"bytes_sent": data["bytes_sent_per_island"], "exchanges": data["exchanges"]} if data["steps"] == step else {}
    return out
