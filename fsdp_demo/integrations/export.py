"""`fsdp-demo export RUN OUT`: what a run has trained, as a folder for `from_pretrained`.

The parameters are those that `Exchange.outer_parameters` shows at that step, from checkpoints alone:

* delta presets: the anchors, from the exchange states of one island; what no channel covers comes from its model;
* presets that average parameters, and those that apply local deltas: the mean of all islands' models;
* gradient presets: the model of any island, they are equal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import Saved
from ..config import ExchangeConfig
from ..inspecting import Found, find, listed
from ..resharding import whole_tensors
from ..shards import plain_name

log = logging.getLogger("fsdp_demo")

FULL, SHARDED = "pytorch_model_fsdp.bin", ".metadata"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Chosen:
    """What is exported: `kind` "anchor", "mean", "parameters" (equal on all islands) or "replica" (those of one island), at `step`, from
    the checkpoints `parts`, one per island that is needed."""

    kind: str
    step: int
    config: ExchangeConfig
    parts: tuple[tuple[Found, Saved], ...]


def export(
    run: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    island: int | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
    push_to_hub: str | None = None,
) -> Chosen:
    """Write the model of a run as a `save_pretrained` folder with a model card.

    Args:
        run: output folder of the Trainer or of recipes/pretrain.py, or one checkpoint of it.
        out: folder to write; made, or empty.
        step: of the checkpoints; default the newest that all islands which are needed have.
        island: take this island's replica alone.
        model: config.json, folder or hub id of the architecture, for checkpoints without a config.json.
        tokenizer: hub id or folder; default the one saved with the run, if there is one.
        push_to_hub: repository to upload the folder to.

    Raises:
        ValueError: nothing to export, islands missing, a checkpoint that is not whole, an OUT that is not empty.
    """
    from .card import write_card

    run, out = Path(run), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not an empty folder: name a new one, or empty it")
    chosen = choose(run, step, island)
    made = build_model(chosen, model, run)
    out.mkdir(parents=True, exist_ok=True)
    words = load_tokenizer(chosen, run, tokenizer)
    made.save_pretrained(out)
    if words is not None:
        words.save_pretrained(out)
    write_card(out, chosen, run, made, words is not None, push_to_hub)
    if push_to_hub:
        upload(out, push_to_hub, chosen)
    return chosen


# ---- which checkpoints -----------------------------------------------------------------------------------------------------------------


def kind_of(config: ExchangeConfig, islands: int) -> str:
    """As `Exchange.shows`, from a configuration: "parameters", "anchor" or "mean"."""
    moving = [c for c in config.channels if c.source in ("delta", "parameter")]
    if not moving or islands == 1 and not any(c.source == "delta" for c in moving):
        return "parameters"
    return "anchor" if all(c.source == "delta" and c.shared for c in moving) else "mean"


def choose(run: Path, step: int | None, island: int | None) -> Chosen:
    """The step, the kind of parameters and the checkpoints they come from."""
    whole: dict[int, dict[int, tuple[Found, Saved]]] = {}  # step -> island -> checkpoint
    broken: list[str] = []
    for found in find(run):
        try:
            saved = found.open()
        except ValueError as error:
            broken.append(str(error))
            continue
        if not saved.complete:
            broken.append(f"{found.folder} is not complete")
            continue
        for number in sorted({head["island"] for head in saved.heads}):
            whole.setdefault(saved.step, {})[number] = (found, saved)
    if not whole:
        raise ValueError(f"{run} holds no complete checkpoint with an exchange state: {'; '.join(broken) or 'no checkpoint-N was found'}")
    if step is not None and step not in whole:
        raise ValueError(f"{run} holds no complete checkpoint of step {step}: there are {listed(whole)}; {'; '.join(broken)}".rstrip("; "))
    lacks: dict[int, list[int]] = {}
    for at in [step] if step is not None else sorted(whole, reverse=True):
        chosen, lacks[at] = _choice(at, whole[at], island)
        if chosen is not None:
            if lacks_newer := [s for s in lacks if s > at]:
                log.warning("step %s is not on all islands (%s): step %d is exported", listed(lacks_newer), "; ".join(broken), at)
            return chosen
    at = max(lacks)
    raise ValueError(
        f"step {at} needs all islands, since replicas differ and their mean is the model; not there (or not whole): island "
        f"{listed(lacks[at])}. Bring {'their folders' if len(lacks[at]) > 1 else 'its folder'} beside the others in {run}, or export one "
        f"replica with --island {min(whole[at])}" + (f" ({'; '.join(broken)})" if broken else "")
    )


def _choice(step: int, there: dict[int, tuple[Found, Saved]], island: int | None) -> tuple[Chosen | None, list[int]]:
    """(what one step gives, islands that it lacks)."""
    head = next(iter(there.values()))[1].heads[0]
    config, islands = ExchangeConfig.from_dict(head["config"]), int(head["islands"])
    kind = kind_of(config, islands)
    if island is not None:
        part = there.get(island)
        kind = "replica" if kind == "mean" else kind
        return (None, [island]) if part is None else (Chosen(kind, step, config, (part,)), [])
    if kind != "mean":
        return Chosen(kind, step, config, (there[min(there)],)), []
    missing = sorted(set(range(islands)) - set(there))
    if missing:
        return None, missing
    parts = tuple(there[i] for i in range(islands))
    if len({found.folder for found, _ in parts}) < islands:
        raise ValueError(
            f"{parts[0][0].folder} is the checkpoint of a mesh: its model file holds parts of several replicas, which differ under preset "
            f"{config.preset!r}; export the model that the finished run saved"
        )
    return Chosen(kind, step, config, parts), []


# ---- tensors ---------------------------------------------------------------------------------------------------------------------------


def read_model(folder: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint folder by plain name, on the CPU: safetensors, a distributed checkpoint, or FSDP's one file."""
    from safetensors.torch import load_file

    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        found = {name: t for file in files for name, t in load_file(folder / file).items()}
    elif single.is_file():
        found = load_file(single)
    elif (folder / FULL).is_file():
        found = torch.load(folder / FULL, map_location="cpu", weights_only=True)
    else:
        metadata = sorted(folder.glob(f"*/{SHARDED}"), key=lambda path: "optim" in path.parent.name)
        if not metadata:
            raise ValueError(f"{folder} holds no model: looked for model.safetensors, {FULL}, and a folder with {SHARDED} (a sharded one)")
        found = _read_sharded(metadata[0].parent)
    return {plain_name(name): tensor for name, tensor in found.items()}


def _read_sharded(folder: Path) -> dict[str, Tensor]:
    """The tensors of a model in a distributed checkpoint, `model.NAME` or `NAME`, without what belongs to an optimizer."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    tensors = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
    nested = any(k.startswith(("optimizer.", "optim.", "exchange.")) for k in entries)
    marked = {k: v for k, v in tensors.items() if k.startswith("model.")}
    if nested or len(marked) == len(tensors):
        tensors = marked
    state: dict[str, Any] = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in tensors.items()}
    load(state, storage_reader=FileSystemReader(str(folder)), no_dist=True)
    return {k.removeprefix("model.") if len(marked) == len(tensors) else k: v for k, v in state.items()}


def outer_tensors(chosen: Chosen) -> dict[str, Tensor]:
    """Whole tensors by plain name: the model of the first checkpoint, its parameters replaced by anchors or by the mean."""
    (found, saved), *others = chosen.parts
    tensors = read_model(found.folder)
    if chosen.kind == "anchor":
        for name, anchor in whole_tensors(saved, "anchor").items():
            tensors[name] = anchor.to(tensors[name].dtype if name in tensors else anchor.dtype)
    elif others:
        frozen = {s["name"] for s in saved.heads[0]["shards_of"] if s["frozen"]}
        average(tensors, [found.folder for found, _ in others], frozen)
    return tensors


def average(tensors: dict[str, Tensor], others: Sequence[Path], frozen: set[str]) -> None:
    """Replace the floating-point tensors by their mean over `tensors` and the models in `others`, in fp32; equal ones stay as they are."""
    total, differ = {}, set()
    for folder in others:
        for name, tensor in read_model(folder).items():
            own = tensors.get(name)
            if own is None or own.shape != tensor.shape:
                here = "nothing" if own is None else tuple(own.shape)
                raise ValueError(f"{folder}: {name} has shape {tuple(tensor.shape)}, the first island has {here}: not replicas of one model")
            if name in frozen or not own.is_floating_point():
                continue
            total[name] = total.get(name, own.float()) + tensor.float()
            if not torch.equal(own, tensor):
                differ.add(name)
    for name in differ:
        tensors[name] = (total[name] / (len(others) + 1)).to(tensors[name].dtype)


# ---- folder ----------------------------------------------------------------------------------------------------------------------------


def build_model(chosen: Chosen, given: str | None, run: Path) -> Any:
    """A transformers model with the exported tensors; parameters are made on no device, so only the tensors take memory."""
    import transformers

    config = _architecture(chosen, given, run)
    named = (config.architectures or [""])[0]
    made = getattr(transformers, named, None)
    with torch.device("meta"):
        model = made(config) if made is not None else transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    tensors = _untied(model, outer_tensors(chosen))
    foreign = sorted(set(tensors) - set(model.state_dict()))
    if foreign:
        raise ValueError(f"{type(model).__name__} has no tensor {', '.join(foreign[:4])}: --model names another architecture than the run's")
    try:
        model.load_state_dict(tensors, strict=False, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{type(model).__name__}: {str(error).splitlines()[1].strip()}; --model names another size than the run's") from None
    model.tie_weights()
    left = [name for name, t in model.state_dict().items() if t.is_meta]
    if left:
        raise ValueError(f"the checkpoint lacks {', '.join(left[:4])}{' ...' if len(left) > 4 else ''} of {type(model).__name__}")
    if getattr(model.config, "use_cache", None) is False:
        model.config.use_cache = True  # off for training; a model to use generates with it
    generation = _beside(chosen, run, "generation_config.json")
    if generation is not None and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(generation)
    return model


def _untied(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without second names of tied weights; what is saved under a second name alone gets the first."""
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
        raise ValueError(f"{chosen.parts[0][0].folder} holds no config.json: say with --model which config.json, folder or hub id it is")
    try:
        return AutoConfig.from_pretrained(where)
    except OSError as error:
        raise ValueError(f"--model {where}: {str(error).splitlines()[0]}") from None


def _beside(chosen: Chosen, run: Path, *names: str) -> Path | None:
    """The folder, from the checkpoint up to the run, that holds a file of one of these names."""
    for found, _ in chosen.parts:
        for folder in (found.folder, *found.folder.parents):
            if any((folder / name).is_file() for name in names):
                return folder
            if folder in (run, run.parent):
                break
    return None


def load_tokenizer(chosen: Chosen, run: Path, given: str | None) -> Any:
    """The tokenizer named, or the one saved with the run; None where there is none."""
    from transformers import AutoTokenizer

    where = given or _beside(chosen, run, *TOKENIZER)
    if where is None:
        return None
    try:
        return AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {where}: {str(error).splitlines()[0]}") from None


def upload(folder: Path, repository: str, chosen: Chosen) -> None:
    """Create the repository if need be, and upload the folder."""
    import huggingface_hub

    huggingface_hub.create_repo(repository, exist_ok=True)
    huggingface_hub.upload_folder(
        repo_id=repository, folder_path=str(folder), commit_message=f"Step {chosen.step}, preset {chosen.config.preset}"
    )
