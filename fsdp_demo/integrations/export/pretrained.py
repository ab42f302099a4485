"""`fsdp-demo export RUN OUT`: what a run has trained, as a folder for `from_pretrained`.

The parameters are those that `Exchange.outer_parameters` shows at that step, from checkpoints
alone:

* delta presets: the anchors, from the exchange states of one island; what no channel covers comes
  from its model;
* presets that average parameters, and those that apply local deltas: the mean of all islands'
  models;
* gradient presets: the model of any island, they are equal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.exchange_state import SavedExchange, load_exchange
from ...checkpoint.folders import damaged
from ...config.schema import ExchangeConfig
from ...errors import UNREADABLE, first_few
from ...files import read_json
from ...tools.inspect import above, exchange_in, find_checkpoints
from ...tools.inspect_words import listed
from .weights import outer_tensors

log = logging.getLogger("fsdp_demo")

FACTS = "facts.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

KINDS = {
    "anchor": "the outer parameters (anchors), which all replicas share",
    "mean": "the mean over the replicas of all islands",
    "parameters": "those of every replica, which this method keeps equal",
    "replica": "those of island {island} alone, **not** the mean over the islands that the method "
    "calls its model",
}


@dataclass(frozen=True)
class Chosen:
    """The parameters to export, and the checkpoints that hold them.

    Attributes:
        kind: "anchor", "mean", "parameters" (equal on all islands) or "replica" (of one island).
        step: the optimizer step.
        config: of the exchange.
        parts: folder, exchange state and number of each island that is needed.
        why: says that the step is the best one; else empty.
    """

    kind: str
    step: int
    config: ExchangeConfig
    parts: tuple[tuple[Path, SavedExchange, int], ...]
    why: str = ""

    @property
    def says(self) -> str:
        """The kind of the parameters, in words."""
        return KINDS[self.kind].format(island=self.parts[0][2])


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    island: int | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
) -> Chosen:
    """Write the model of a run as a `save_pretrained` folder with a model card.

    Args:
        run: output folder of the Trainer or of recipes/pretrain.py, or one checkpoint of it.
        out: folder to write; made, or empty.
        step: default the Trainer's best, else the newest that all islands that are needed have.
        island: take this island's replica alone.
        model: config.json, folder or hub id of the architecture, for checkpoints without a
            config.json.
        tokenizer: hub id or folder; default the one saved with the run, if there is one.

    Raises:
        ValueError: nothing to export, islands missing, a checkpoint that is not whole, an OUT that
            is not empty.
    """
    from .card import write_card

    run, out = Path(run).resolve(), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: name a new one, or empty it")
    chosen = choose(run, step, island)
    refuse_unreadable(chosen)
    words = load_tokenizer(chosen, run, tokenizer)
    made = build_model(chosen, model, run)
    out.mkdir(parents=True, exist_ok=True)
    made.save_pretrained(out)
    if words is not None:
        words.save_pretrained(out)
    write_card(out, chosen, run, made, words is not None)
    return chosen


def refuse_unreadable(chosen: Chosen) -> None:
    """Raise ValueError for files of DeepSpeed's own, and where a file does not fit the checksum
    that was written with it. A json may have been edited since.
    """
    for folder, _, _ in chosen.parts:
        if any(folder.glob("*_model_states.pt")):
            raise ValueError(
                f"{folder} was written by DeepSpeed, whose files export does not read. For the "
                "parameters of this island in fp32 run: python "
                f"{folder.parent / 'zero_to_fp32.py'} {folder.parent} OUT --tag {folder.name}"
            )
        bad = [name for name in damaged(folder) if not name.endswith(".json")]
        if bad:
            raise ValueError(
                f"{folder} is damaged, the checksum does not fit: {', '.join(bad[:4])}. "
                "Bring a whole copy of it, or export another step with --step"
            )


# ---- which checkpoints -------------------------------------------------------------------------


def choose(run: Path, step: int | None, island: int | None) -> Chosen:
    """The step, the kind of parameters and the checkpoints they come from."""
    whole, broken = _whole_ones(run)
    because = f" ({'; '.join(broken)})" if broken else ""
    if not whole:
        raise ValueError(f"{run} holds no complete checkpoint with an exchange state{because}")
    if step is not None and step not in whole:
        raise ValueError(
            f"{run} holds no complete checkpoint of step {step}: there are {listed(whole)}{because}"
        )
    lacks: dict[int, list[int]] = {}
    best, why = _best(whole) if step is None else (step, "")
    if best is not None and best not in whole:
        log.warning("the checkpoint of step %d, the Trainer's best, is not here", best)
    order = sorted(whole, key=lambda at: (at == best, at), reverse=True)
    for at in order if step is None else [step]:
        chosen, lacks[at] = _choice(at, whole[at], island)
        if chosen is not None:
            newer = [s for s in lacks if s > at]
            if newer:
                text = "step %s is not whole on all islands that are needed%s: step %d is exported"
                log.warning(text, listed(newer), because, at)
            return replace(chosen, why=why) if at == best else chosen
    at = max(lacks)
    if island is not None:
        raise ValueError(
            f"{run} holds nothing of island {island} at step {at}, there are islands "
            f"{listed(whole[at])}{because}"
        )
    raise ValueError(
        f"step {at} needs all islands, since replicas differ and their mean is the model; not "
        f"there (or not whole): island {listed(lacks[at])}. Bring "
        f"{'their folders' if len(lacks[at]) > 1 else 'its folder'} beside the others in {run}, "
        f"or export one replica with --island {min(whole[at])}{because}"
    )


def _best(whole: dict[int, dict[int, tuple[Path, SavedExchange]]]) -> tuple[int | None, str]:
    """The step that the newest state of the Trainer calls its best, and the words for that."""
    for at in sorted(whole, reverse=True):
        for folder, _ in whole[at].values():
            with suppress(OSError, *UNREADABLE):
                state = read_json(folder / "trainer_state.json")
                step = int(state["best_model_checkpoint"].rsplit("-", 1)[-1])
                return step, f", the Trainer's best (metric {state['best_metric']:.4g})"
    return None, ""


def _whole_ones(run: Path) -> tuple[dict[int, dict[int, tuple[Path, SavedExchange]]], list[str]]:
    """The complete checkpoints by step and island, and what is wrong with the others."""
    whole: dict[int, dict[int, tuple[Path, SavedExchange]]] = {}
    broken: list[str] = []
    for folder in find_checkpoints(run):
        try:
            saved = load_exchange(exchange_in(folder))
        except ValueError as error:
            broken.append(str(error))
            continue
        if saved.missing:
            lost = ", ".join(f"rank {rank} of island {number}" for number, rank in saved.missing)
            broken.append(f"{folder} is not complete: it lacks {lost}")
        else:
            _add(whole.setdefault(saved.step, {}), folder, saved)
    return whole, broken


def _add(there: dict[int, tuple[Path, SavedExchange]], folder: Path, saved: SavedExchange) -> None:
    for number in saved.islands:
        if number in there:
            raise ValueError(
                f"{there[number][0]} and {folder} are both of island {number} at one "
                "step: name the folder of one run"
            )
        there[number] = (folder, saved)
    kin = {(s.heads[0]["digest"], s.heads[0]["islands"]) for _, s in there.values()}
    if len(kin) > 1:
        folders = ", ".join(str(f) for f, _ in there.values())
        raise ValueError(
            f"{folders} were saved under different settings or numbers of islands: name the folder "
            "of one run"
        )


def _choice(
    step: int, there: dict[int, tuple[Path, SavedExchange]], island: int | None
) -> tuple[Chosen | None, list[int]]:
    """The parameters that one step gives, or None and the islands whose checkpoints it lacks."""
    head = next(iter(there.values()))[1].heads[0]
    config, islands = ExchangeConfig.from_dict(head["config"]), int(head["islands"])
    kind = config.result(islands)
    needed = [island] if island is not None else range(islands) if kind == "mean" else [min(there)]
    missing = sorted(set(needed) - set(there))
    if missing:
        return None, missing
    parts = tuple((*there[i], i) for i in needed)
    kind = "replica" if kind == "mean" and island is not None else kind
    return Chosen(kind, step, config, parts), []


# ---- folder ------------------------------------------------------------------------------------


def build_model(chosen: Chosen, given: str | None, run: Path) -> Any:
    """A transformers model with the exported tensors. It is made on the meta device, so that only
    the tensors take memory. Raises ValueError: no architecture is known, or it does not fit the
    tensors.
    """
    import transformers

    config = _architecture(chosen, given, run)
    named = (config.architectures or [""])[0]
    make = getattr(transformers, named, None) or transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(config)
    model.tie_weights()
    _fill(model, _untied(model, outer_tensors(chosen.kind, chosen.parts)))
    if getattr(model.config, "use_cache", None) is False:
        model.config.use_cache = True  # off for training; a model to use generates with it
    generation = _beside(chosen, run, "generation_config.json")
    if generation is not None and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(generation)
    return model


def _fill(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put the tensors into a model on the meta device; ValueError where they do not fit it."""
    foreign = sorted(set(tensors) - set(model.state_dict()))
    if foreign:
        raise ValueError(
            f"{type(model).__name__} has no tensor {', '.join(foreign[:4])}: --model names another "
            "architecture"
        )
    try:
        model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__}: {str(error).splitlines()[1].strip()}; --model names another "
            "size"
        ) from None
    model.tie_weights()
    left = [name for name, t in model.state_dict().items() if t.is_meta]
    if left:
        raise ValueError(f"the checkpoint lacks {first_few(left)} of {type(model).__name__}")


def _untied(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with tied weights under their first names only; one that is saved under a second
    name alone gets the first.
    """
    first = {id(p): name for name, p in model.named_parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first[id(p)] != name and name in tensors:
            second = tensors.pop(name)
            tensors.setdefault(first[id(p)], second)
    return tensors


def _architecture(chosen: Chosen, given: str | None, run: Path) -> Any:
    from transformers import AutoConfig

    where = given or _beside(chosen, run, "config.json")
    if where is None:
        raise ValueError(
            f"{chosen.parts[0][0]} holds no config.json: say with --model which "
            "config.json, folder or hub id it is"
        )
    try:
        return AutoConfig.from_pretrained(where)
    except OSError as error:
        raise ValueError(f"--model {where}: {str(error).splitlines()[0]}") from None


def _beside(chosen: Chosen, run: Path, *names: str) -> Path | None:
    """The folder, from a checkpoint up to the run, that holds a file of one of these names."""
    folders = (place for folder, _, _ in chosen.parts for place in above(folder, run))
    return next(
        (folder for folder in folders if any((folder / name).is_file() for name in names)), None
    )


def load_tokenizer(chosen: Chosen, run: Path, given: str | None) -> Any:
    """The tokenizer named, or the one saved with the run; None where there is none."""
    from transformers import AutoTokenizer

    where: Any = given or _beside(chosen, run, *TOKENIZER)
    # recipes/pretrain.py names what it was given
    if where is None and (facts := _beside(chosen, run, FACTS)) is not None:
        named = read_json(facts / FACTS).get("tokenizer")
        where = named if named != "bytes" else None
    if where is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        what = "no tokenizer could be loaded; name another with --tokenizer"
        raise ValueError(f"{where}: {what} ({str(error).splitlines()[0]})") from None
