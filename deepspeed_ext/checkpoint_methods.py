"""`engine.save_checkpoint` and `engine.load_checkpoint` as the exchange replaces them: with the
arguments and files of DeepSpeed's own methods, in a folder of one replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_demo.checkpoint.files import sync_folder
from fsdp_demo.files import in_one_piece

from .all_ranks import replica as ranks_of
from .all_ranks import world

log = logging.getLogger("fsdp_demo")


def latest(folder: Path) -> str | None:
    """The tag that `FOLDER/latest` names; None without that file."""
    named = folder / "latest"
    return named.read_text(encoding="utf-8").strip() if named.is_file() else None


def separate(engine: Any, replica: int) -> None:
    """In a mesh: let replica 0 save to and load from the directory itself, replica r from
    `DIR/replica<r>`, without the exchange's state.

    For hosts that keep the exchange's state elsewhere (the Trainer). `checkpoints.follow` takes its
    place. A replica without a folder loads that of replica 0.

    Raises:
        ValueError: the engine writes its files in the background.
    """
    ReplicaCheckpoints(engine, replica).install()


class ReplicaCheckpoints:
    """The replacements of an engine's two methods for checkpoints: DeepSpeed's files in a folder of
    one replica.

    `save` writes what this replica has, `load` reads what it goes on from. Both get the directory
    that the user names, a tag, and all other arguments of DeepSpeed's methods by name.

    Args:
        replica: number of the replica, which names its folder.

    Attributes:
        theirs: DeepSpeed's own two methods.
        ranks, world: votes among the ranks of this replica, and of the engine's world.
        first: whether this rank is the first of its replica.
    """

    def __init__(self, engine: Any, replica: int):
        self.engine, self.replica = engine, replica
        before = getattr(engine.save_checkpoint, "__self__", None)
        own = (engine.save_checkpoint, engine.load_checkpoint)
        self.theirs: tuple[Callable[..., Any], Callable[..., Any]] = (
            before.theirs if isinstance(before, ReplicaCheckpoints) else own
        )
        self.ranks, self.world = ranks_of(engine), world()
        self.first = self.ranks.rank == 0

    def install(self) -> None:
        """Replace the engine's own methods. Raises ValueError: the engine writes its files in the
        background.
        """
        engine = self.engine
        if engine.checkpoint_engine.is_decoupled():
            raise ValueError(
                "checkpoint.writer.decoupled in DeepSpeed's configuration: files are written "
                "while training goes on, and the exchange's state would be beside files that are "
                "not there yet. Set it to false, or attach(..., checkpoints=False)"
            )
        engine.save_checkpoint = self.save_checkpoint
        engine.load_checkpoint = self.load_checkpoint
        engine._get_shared_params = self.tied  # DeepSpeed knows them on rank 0 of the world only

    def _folder(self, root: Path) -> Path:
        return root / f"replica{self.replica}" if self.replica else root

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Replacement of the engine's method, with its arguments: `save`."""
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
        """Replacement of the engine's method, with its arguments: `load`."""
        options = {k: v for k, v in locals().items() if k not in ("self", "load_dir", "tag")}
        return self.load(Path(load_dir), None if tag is None else str(tag), options)

    def save(self, root: Path, tag: str, options: dict[str, Any]) -> Any:
        """Save as DeepSpeed does, into this replica's folder."""
        folder = self._folder(root)
        what = f"{folder / tag}: it stays unfinished"
        self.world.together(lambda: folder.mkdir(parents=True, exist_ok=True), what)
        done = self.world.together(lambda: self.write(folder, tag, options), what)
        self.name(folder, tag, options)
        return done

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """Load as DeepSpeed does, from this replica's folder; without a tag that of replica 0."""
        tag = self.world.from_first(lambda: latest(root)) if tag is None else tag
        own = self._folder(root)
        if tag is not None and not self.ranks.from_first(lambda: (own / str(tag)).is_dir()):
            if self.first:
                log.warning(
                    "%s is not there: replica %d takes over from replica 0", own / tag, self.replica
                )
            own = root
        return self.load_from(own, tag, options)

    def write(self, folder: Path, tag: str, options: dict[str, Any]) -> Any:
        """Write DeepSpeed's files. Where the exchange clips, they hold the norm of the
        configuration, so that the engine clips where they are loaded without an exchange.
        """
        engine, zero = self.engine, self.engine.optimizer
        clip, zero.clip_grad = zero.clip_grad, engine.gradient_clipping()
        given = {**options, "client_state": options["client_state"] or {}, "save_latest": False}
        try:
            done = self.theirs[0](str(folder), tag, **given)
        finally:
            zero.clip_grad = clip
        if self.first and engine.global_rank != 0:
            engine._copy_recovery_script(str(folder))
        return done

    def name(self, folder: Path, tag: str, options: dict[str, Any]) -> None:
        """Write the tag into `latest`, once all files are there."""

        def write() -> None:
            in_one_piece(folder / "latest", lambda part: part.write_text(tag, encoding="utf-8"))
            sync_folder(folder)

        if options["save_latest"]:
            self.world.together(lambda: write() if self.first else None, str(folder / "latest"))

    def load_from(self, folder: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """Load by DeepSpeed's method. Gradients are clipped as before, whatever is loaded."""
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
        """Names of tied parameters, each with the first name of its tensor: for `zero_to_fp32`."""
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
