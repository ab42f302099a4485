"""DeepSpeed's two methods in front, its own underneath in a folder of one replica, and words with
the other ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_demo.checkpoint.files import sync_folder
from fsdp_demo.checkpoint.folders import MANIFEST, seal, sum_up
from fsdp_demo.files import in_one_piece

from .all_ranks import replica, world
from .checkpoint_choice import PARTS, latest


class Folders:
    """What both have in common: methods with DeepSpeed's signatures that call `save` and `load`,
    DeepSpeed's own two underneath, and words with the other ranks of the replica (`ranks`) and
    of the engine's world (`world`).

    Options are all other arguments of DeepSpeed's methods, by name."""

    def __init__(self, engine: Any):
        self.engine = engine
        before = getattr(engine.save_checkpoint, "__self__", None)
        own = (engine.save_checkpoint, engine.load_checkpoint)
        self.theirs: tuple[Callable[..., Any], Callable[..., Any]] = (
            before.theirs if isinstance(before, Folders) else own
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
        return self.load(Path(load_dir), tag, options)

    def save(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """Save what this replica has, below the directory that the user names."""
        raise NotImplementedError

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """Load what this replica goes on from, below the directory that the user names."""
        raise NotImplementedError

    def save_into(
        self,
        folder: Path,
        tag: Any,
        options: dict[str, Any],
        parts: Callable[[Path], None] | None = None,
    ) -> Any:
        """DeepSpeed's files, then on every rank `parts(FOLDER/TAG/exchange)`, then the manifest
        with all checksums, then `latest`.
        """
        engine = self.engine
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        place, what = folder / tag, f"{folder / tag}: it stays unfinished"
        self.world.together(lambda: self._clear(place, parts is not None), what)
        error: Exception | None = None
        done: Any = None
        try:
            with self._own_clipping():
                done = self.theirs[0](
                    str(folder),
                    tag,
                    options["client_state"] or {},
                    False,
                    options["exclude_frozen_parameters"],
                )
            if parts is not None:
                parts(place / PARTS)
            if self.first and engine.global_rank != 0:
                engine._copy_recovery_script(str(folder))
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        self.world.settle(error, what)
        if parts is not None:
            self.world.together(lambda: sum_up(place, self.ranks.rank, self.ranks.world), what)
        self.world.together(
            lambda: self._name(folder, tag, parts is not None, options["save_latest"]), what
        )
        return done

    def _clear(self, place: Path, parts: bool) -> None:
        """From now on what was there is not whole."""
        if not self.first:
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(place / PARTS, ignore_errors=True)
        (place / MANIFEST).unlink(missing_ok=True)
        if parts:
            (place / PARTS).mkdir(parents=True)

    def _name(self, folder: Path, tag: str, sealed: bool, save_latest: bool) -> None:
        """All files are there: the manifest, and `latest`."""
        self.fenced()
        if self.first and sealed:
            seal(folder / tag, self.engine.global_steps, self.ranks.world)
        if self.first and save_latest:
            in_one_piece(folder / "latest", lambda part: part.write_text(tag, encoding="utf-8"))
            sync_folder(folder)

    def fenced(self) -> None:
        """Raise where the folder belongs to a later life."""

    def load_from(self, folder: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """DeepSpeed's load. How gradients are clipped is said by the configuration and by `attach`,
        not by the checkpoint.
        """
        zero, error, result = self.engine.optimizer, None, (None, None)
        clip = zero.clip_grad
        if self.engine.zero_optimization_stage() == 3:
            options = self._weights_of_stage3(folder, tag, options)
        try:
            result = self.theirs[1](str(folder), tag, **options)
        except Exception as e:
            error = e
        zero.clip_grad = clip
        self.world.settle(error, f"{folder}/{tag} could not be loaded")
        return result

    @staticmethod
    def _weights_of_stage3(
        folder: Path, tag: str | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Under ZeRO-3 `load_module_only` loads nothing, silently, unless `load_optimizer_states`
        is off; then weights are read from the tag in `latest`, whichever was asked for."""
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

    @contextmanager
    def _own_clipping(self) -> Iterator[None]:
        """Within it the wrapper has the norm of the configuration: a checkpoint that is loaded
        without the exchange clips.
        """
        zero = self.engine.optimizer
        clip, zero.clip_grad = zero.clip_grad, self.engine.gradient_clipping()
        try:
            yield
        finally:
            zero.clip_grad = clip

    def tied(self) -> dict[str, str]:
        """Names of parameters that are another one's: `zero_to_fp32` finds these by it."""
        seen: dict[int, str] = {}
        pairs = [
            (n, seen.setdefault(id(p), n))
            for n, p in self.engine.module.named_parameters(remove_duplicate=False)
        ]
        return {name: first for name, first in pairs if name != first}
