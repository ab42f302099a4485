"""The model card (README.md) of an exported folder: what was trained, how, at what cost in bytes,
and which parameters these are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import yaml

from ...errors import counted, size
from ...runlog.files import EVENTS_FILE, STEPS_FILE, SUMMARY_FILE, read_json, read_lines
from ...tools.inspect import above, settings
from ...tools.inspect_words import ranks
from ...version import __version__


def write_card(out: Path, chosen: Any, run: Path, model: Any, tokenizer: bool) -> None:
    """Write README.md into `out`, without numbers that the run did not record."""
    name = out.resolve().name
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

model = AutoModelForCausalLM.from_pretrained("{name}")
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
    yield "step", f"{chosen.step}{chosen.why}"
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


def numbers(folder: Path, run: Path, step: int, ended: bool) -> dict[str, str]:
    """Tokens, losses and bytes at `step` from the run log (`runlog/files.py`) that lies between the
    checkpoint's folder and the run's; empty without one.

    ended: every channel has sent after this step, so that what was evaluated at the end of the run
    is what the checkpoint holds.
    """
    place = next((p for p in above(folder, run) if (p / STEPS_FILE).is_file()), run)
    lines = [line for line in read_lines(place / STEPS_FILE)[0] if line.get("step", 0) <= step]
    found, summary = dict(lines[-1]) if lines else {}, read_json(place / SUMMARY_FILE) or {}
    at_end = summary.get("steps") == step
    if at_end:  # the last exchange comes after the last line
        found["bytes_sent"] = summary.get("bytes_sent_per_island")
    for event in read_lines(place / EVENTS_FILE)[0]:
        here = event.get("kind") == "evaluation" and event.get("step") == step
        if here and (ended or not at_end):
            found["eval_loss"] = event.get("loss")
    labels = {
        "global_loss": "training loss, all islands",
        "loss": "training loss, one island",
        "eval_loss": "evaluation loss",
    }
    out = {"tokens, all islands": f"{found['tokens']:,}"} if found.get("tokens") else {}
    out |= {
        label: f"{found[key]:.4f}" for key, label in labels.items() if found.get(key) is not None
    }
    if found.get("bytes_sent"):
        out["bytes sent by an island"] = size(found["bytes_sent"])
    return out
