"""DeepSpeed's own two methods underneath, in a folder of one replica, and words with the other ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from fsdp_demo.checkpoint.files import in_one_piece, sync_folder
from fsdp_demo.checkpoint.folders import MANIFEST, seal, sum_up
from fsdp_demo.checkpoint.ranks import Ranks
from fsdp_demo.errors import NeedsDecision, PeerLost

from .checkpoint_choice import PARTS, latest


class World(Ranks):
    """All ranks of the engine's world, whose words travel with its own backend."""

    def __init__(self) -> None:
        super().__init__(None, comm.get_rank(), comm.get_world_size())

    def largest(self, number: float) -> float:
        vote = torch.tensor([float(number)], device=get_accelerator().current_device_name())
        comm.all_reduce(vote, op=comm.ReduceOp.MAX)
        return vote.item()


class Folders:
    """What both have in common: DeepSpeed's own two methods underneath, and words with the other ranks."""

    def __init__(self, engine: Any):
        self.engine = engine
        before = getattr(engine.save_checkpoint, "__self__", None)
        own = (engine.save_checkpoint, engine.load_checkpoint)
        self.theirs: tuple[Callable[..., Any], Callable[..., Any]] = before.theirs if isinstance(before, Folders) else own
        self.group = engine.seq_data_parallel_group
        self.rank, self.size = comm.get_rank(group=self.group), comm.get_world_size(group=self.group)
        self.first, self.ranks = self.rank == 0, World()

    def save_into(
        self, folder: Path, tag: Any, client_state: Any, save_latest: bool, frozen: bool, parts: Callable[[Path], None] | None = None
    ) -> Any:
        """DeepSpeed's files, then on every rank `parts(FOLDER/TAG/exchange)`, then the manifest with all checksums, then `latest`."""
        engine = self.engine
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        place, what = folder / tag, f"{folder / tag}: it stays unfinished"
        self.ranks.together(lambda: self._clear(place, parts is not None), what)
        error: Exception | None = None
        done: Any = None
        try:
            with self._own_clipping():
                done = self.theirs[0](str(folder), tag, client_state or {}, False, frozen)
            if parts is not None:
                parts(place / PARTS)
            if self.first and engine.global_rank != 0:
                engine._copy_recovery_script(str(folder))
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        self.ranks.settle(error, what)
        if parts is not None:
            self.ranks.together(lambda: sum_up(place, self.rank, self.size), what)
        self.ranks.together(lambda: self._name(folder, tag, parts is not None, save_latest), what)
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
            seal(folder / tag, self.engine.global_steps, self.size)
        if self.first and save_latest:
            in_one_piece(folder / "latest", lambda part: part.write_text(tag, encoding="utf-8"))
            sync_folder(folder)

    def fenced(self) -> None:
        """Raise where the folder belongs to a later life."""

    def load_from(self, folder: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """DeepSpeed's load. How gradients are clipped is said by the configuration and by `attach`, not by the checkpoint."""
        zero, error, result = self.engine.optimizer, None, (None, None)
        clip = zero.clip_grad
        if self.engine.zero_optimization_stage() == 3:
            options = self._weights_of_stage3(folder, tag, options)
        try:
            result = self.theirs[1](str(folder), tag, **options)
        except Exception as e:
            error = e
        zero.clip_grad = clip
        self.all_well(error, f"{folder}/{tag} could not be loaded by another rank")
        return result

    @staticmethod
    def _weights_of_stage3(folder: Path, tag: str | None, options: dict[str, Any]) -> dict[str, Any]:
        """Under ZeRO-3 `load_module_only` loads nothing, silently, unless `load_optimizer_states` is off; then weights are read from the
        tag in `latest`, whichever was asked for."""
        if not options["load_module_only"] and options["load_optimizer_states"]:
            return options
        named = latest(folder)
        if tag is not None and named != tag:
            raise ValueError(
                f"{folder / 'latest'} names {named}: DeepSpeed's ZeRO-3 reads weights without optimizer states from there only, not from "
                f"{tag}. Write {tag} into it, or load the optimizer states too"
            )
        return {**options, "load_optimizer_states": False}

    @contextmanager
    def _own_clipping(self) -> Iterator[None]:
        """Within it the wrapper has the norm of the configuration: a checkpoint that is loaded without the exchange clips."""
        zero = self.engine.optimizer
        clip, zero.clip_grad = zero.clip_grad, self.engine.gradient_clipping()
        try:
            yield
        finally:
            zero.clip_grad = clip

    def all_well(self, error: Exception | None, text: str) -> None:
        """Raise on all ranks of the world what happened on one (`Ranks.settle`)."""
        self.ranks.settle(error, text)

    def from_first(self, ask: Callable[[], Any], group: Any = None) -> Any:
        """What `ask` gives (JSON) on the first rank of the replica, or of `group`; its error is raised on all of them."""
        group = self.group if group is None else group
        value: list[Any] = [None]
        if comm.get_rank(group=group) == 0:
            try:
                value = [json.dumps([ask(), "", ""])]
            except (ValueError, RuntimeError, OSError) as error:
                value = [json.dumps([None, type(error).__name__, str(error)])]
        torch.distributed.broadcast_object_list(value, group_src=0, group=group)
        got, kind, text = json.loads(value[0])
        if kind:
            raise {e.__name__: e for e in (ValueError, NeedsDecision, PeerLost)}.get(kind, RuntimeError)(text)
        return got

    def tied(self) -> dict[str, str]:
        """Names of parameters that are another one's: `zero_to_fp32` finds these by it."""
        seen: dict[int, str] = {}
        pairs = [(n, seen.setdefault(id(p), n)) for n, p in self.engine.module.named_parameters(remove_duplicate=False)]
        return {name: first for name, first in pairs if name != first}
