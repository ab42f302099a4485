"""DeepSpeed's two methods for checkpoints in front, its own underneath in a folder of one replica,
and words with the other ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_demo.checkpoint.files import sync_folder
from fsdp_demo.files import in_one_piece

from .all_ranks import replica, world


def latest(folder: Path) -> str | None:
    """The tag that `FOLDER/latest` names."""
    try:
        return (folder / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None


class Methods(ABC):
    """DeepSpeed's two methods in front, its own underneath (`theirs`), and words with the other
    ranks of the replica (`ranks`) and of the engine's world (`world`).

    `save` and `load` are given the directory that the user names, a tag, and all other arguments of
    DeepSpeed's methods by name: they save what this replica has, and load what it goes on from."""

    @abstractmethod
    def save(self, root: Path, tag: str, options: dict[str, Any]) -> Any: ...

    @abstractmethod
    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any: ...

    def __init__(self, engine: Any):
        self.engine = engine
        before = getattr(engine.save_checkpoint, "__self__", None)
        own = (engine.save_checkpoint, engine.load_checkpoint)
        self.theirs: tuple[Callable[..., Any], Callable[..., Any]] = (
            before.theirs if isinstance(before, Methods) else own
        )
        self.ranks, self.world = replica(engine), world()
        self.first = self.ranks.rank == 0

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """In the place of the engine's method: `save`."""
        options = {k: v for k, v in locals().items() if k not in ("self", "save_dir", "tag")}
        tag = str(tag) if tag is not None else f"global_step{self.engine.global_steps}"
        return self.save(Path(save_dir), tag, options)

    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """In the place of the engine's method: `load`."""
        options = {k: v for k, v in locals().items() if k not in ("self", "load_dir", "tag")}
        return self.load(Path(load_dir), None if tag is None else str(tag), options)

    def write(self, folder: Path, tag: str, options: dict[str, Any]) -> Any:
        """DeepSpeed's files. What clips by the exchange is saved with the norm of the
        configuration: a checkpoint that is loaded without the exchange clips.
        """
        engine, zero = self.engine, self.engine.optimizer
        clip, zero.clip_grad = zero.clip_grad, engine.gradient_clipping()
        try:
            done = self.theirs[0](
                str(folder),
                tag,
                options["client_state"] or {},
                False,
                options["exclude_frozen_parameters"],
            )
        finally:
            zero.clip_grad = clip
        if self.first and engine.global_rank != 0:
            engine._copy_recovery_script(str(folder))
        return done

    def name(self, folder: Path, tag: str, options: dict[str, Any]) -> None:
        """`latest`, when all files are there."""

        def write() -> None:
            in_one_piece(folder / "latest", lambda part: part.write_text(tag, encoding="utf-8"))
            sync_folder(folder)

        if options["save_latest"]:
            self.world.together(lambda: write() if self.first else None, str(folder / "latest"))

    def load_from(self, folder: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """DeepSpeed's load. How gradients are clipped is said by the configuration and by `attach`,
        not by the checkpoint.
        """
        zero = self.engine.optimizer
        clip = zero.clip_grad
        if self.engine.zero_optimization_stage() == 3:
            options = _weights_of_stage3(folder, tag, options)
        result = self.world.together(
            lambda: self.theirs[1](str(folder), tag, **options),
            f"{folder}/{tag} could not be loaded",
        )
        zero.clip_grad = clip
        return result

    def tied(self) -> dict[str, str]:
        """Names of parameters that are another one's: `zero_to_fp32` finds these by it."""
        seen: dict[int, str] = {}
        pairs = [
            (n, seen.setdefault(id(p), n))
            for n, p in self.engine.module.named_parameters(remove_duplicate=False)
        ]
        return {name: first for name, first in pairs if name != first}


def _weights_of_stage3(folder: Path, tag: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Under ZeRO-3 `load_module_only` loads nothing, silently, unless `load_optimizer_states` is
    off; then weights are read from the tag in `latest`, whichever was asked for."""
    if not options["load_module_only"] and options["load_optimizer_states"]:
        return options
    named = latest(folder)
    if tag is not None and named != tag:
        raise ValueError(
            f"{folder / 'latest'} names {named}: DeepSpeed's ZeRO-3 reads weights without "
            "optimizer states from there only, not from "
            f"{tag}. Write {tag} into it, or load the optimizer states too"
        )
    return {**options, "load_optimizer_states": False}
