"""DeepSpeed's checkpoints, one folder per replica, with the exchange's state in them.

DeepSpeed names its files by the rank inside the node: replicas that share a directory would overwrite each other. So every replica has a
folder with DeepSpeed's standard layout inside (`zero_to_fp32.py FOLDER` works on each), and a `latest` of its own, which is written when
all else is there. What lies where, and who loads what: `finding.py`.

Source of the facts: deepspeed 0.19.8, `runtime/engine.py` (`save_checkpoint`, `load_checkpoint`): only rank 0 of the world writes `latest`,
the recovery scripts and the names of tied parameters; the tag is compared over the world; `clip_grad` is saved and restored.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator

from fsdp_demo import Exchange
from fsdp_demo.board import Board
from fsdp_demo.checkpoint import Saved, open_exchange, save_exchange
from fsdp_demo.parts import in_one_piece, sync_folder
from fsdp_demo.transport import PeerLost

from .finding import CURE, PARTS, Choice, choose, choose_tag, folder_of, latest, look

log = logging.getLogger("fsdp_demo")

T = TypeVar("T")


def follow(engine: Any, exchange: Exchange) -> None:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` keep a folder per replica with the exchange's state in it.

    `load_checkpoint` is called by all replicas together, like `attach`. With `load_optimizer_states=False` or `load_module_only=True`
    the channels start anew from the loaded weights.

    Raises:
        ValueError: the engine writes its files in the background.
    """
    _install(engine, _Followed(engine, exchange))


def separate(engine: Any, replica: int) -> None:
    """In a mesh: let replica 0 save to and load from the directory itself, replica r from `DIR/replica<r>`, without the exchange's state.

    For hosts that keep the exchange's state elsewhere (the Trainer). `follow` takes its place. A replica without a folder loads that of
    replica 0.

    Raises:
        ValueError: the engine writes its files in the background.
    """
    _install(engine, _Separate(engine, replica))


def _install(engine: Any, folders: _Separate | _Followed) -> None:
    if engine.checkpoint_engine.is_decoupled():
        raise ValueError(
            "checkpoint.writer.decoupled in DeepSpeed's configuration: files are written while training goes on, and the exchange's state "
            "would be beside files that are not there yet. Set it to false, or attach(..., checkpoints=False)"
        )
    engine.save_checkpoint, engine.load_checkpoint = folders.save_checkpoint, folders.load_checkpoint
    engine._get_shared_params = folders.tied  # DeepSpeed knows them on rank 0 of the world only


class _Folders:
    """What both have in common: DeepSpeed's own two methods underneath, and words with the other ranks."""

    def __init__(self, engine: Any):
        self.engine = engine
        before = getattr(engine.save_checkpoint, "__self__", None)
        own = (engine.save_checkpoint, engine.load_checkpoint)
        self.theirs: tuple[Callable[..., Any], Callable[..., Any]] = before.theirs if isinstance(before, _Folders) else own
        self.group = engine.seq_data_parallel_group
        self.first = comm.get_rank(group=self.group) == 0

    def save_into(
        self, folder: Path, tag: Any, client_state: Any, save_latest: bool, frozen: bool, parts: Callable[[Path], None] | None = None
    ) -> Any:
        """DeepSpeed's files, then on every rank `parts(FOLDER/TAG/exchange)`, then `latest`."""
        engine = self.engine
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        if self.first:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(folder / tag / PARTS, ignore_errors=True)  # from now on what was there is not whole
            if parts is not None:
                (folder / tag / PARTS).mkdir(parents=True)
        with self._own_clipping():
            done = self.theirs[0](str(folder), tag, client_state or {}, False, frozen)
        error: Exception | None = None
        try:
            if parts is not None:
                parts(folder / tag / PARTS)
            if self.first and engine.global_rank != 0:
                engine._copy_recovery_script(str(folder))
        except Exception as e:  # the other ranks wait for this one's vote
            error = e
        self.all_well(error, f"{folder / tag} could not be written by another rank: it stays unfinished")
        if save_latest and self.first:
            in_one_piece(folder / "latest", lambda part: part.write_text(tag, encoding="utf-8"))
            sync_folder(folder)
        comm.barrier()
        return done

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
        """Raise on all ranks of the world what happened on one."""
        vote = torch.tensor([float(error is not None)], device=get_accelerator().current_device_name())
        comm.all_reduce(vote, op=comm.ReduceOp.MAX)
        if vote.item():
            raise error or RuntimeError(text)

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
            raise {"ValueError": ValueError, "PeerLost": PeerLost}.get(kind, RuntimeError)(text)
        return got

    def tied(self) -> dict[str, str]:
        """Names of parameters that are another one's: `zero_to_fp32` finds these by it."""
        seen: dict[int, str] = {}
        pairs = [(n, seen.setdefault(id(p), n)) for n, p in self.engine.module.named_parameters(remove_duplicate=False)]
        return {name: first for name, first in pairs if name != first}


class _Separate(_Folders):
    def __init__(self, engine: Any, replica: int):
        super().__init__(engine)
        self.replica = replica

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
        """As DeepSpeed's, into this replica's folder."""
        return self.save_into(self._folder(Path(save_dir)), tag, client_state, save_latest, exclude_frozen_parameters)

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
        """As DeepSpeed's, from this replica's folder. The tag is that of replica 0."""
        options = {k: v for k, v in locals().items() if k not in ("self", "load_dir", "tag")}
        root = Path(load_dir)

        tag = self.from_first(lambda: latest(root), torch.distributed.group.WORLD) if tag is None else str(tag)
        own = self._folder(root)
        if tag is not None and not self.from_first(lambda: (own / str(tag)).is_dir()):
            if self.first:
                log.warning("%s is not there: replica %d takes over from replica 0", own / tag, self.replica)
            own = root
        return self.load_from(own, tag, options)


class _Followed(_Folders):
    def __init__(self, engine: Any, exchange: Exchange):
        super().__init__(engine)
        self.exchange = exchange

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """As DeepSpeed's, into `save_dir/<name of the replica>`, with the exchange's state."""
        if self.exchange.showing:
            raise RuntimeError("save_checkpoint inside outer_parameters would save these as the replica's own: leave the context first")
        folder = folder_of(Path(save_dir), self.exchange.topology)
        parts = partial(save_exchange, exchange=self.exchange)
        return self.save_into(folder, tag, client_state, save_latest, exclude_frozen_parameters, parts)

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
        """As DeepSpeed's, and the exchange goes on from its saved state. All replicas call it together, at the same step.

        Without a tag all load the newest that all hold whole.

        Raises:
            ValueError: no checkpoint in common, one that is half-written, or of another preset, model or number of ranks per replica.
            PeerLost: replicas that did not come in time.
        """
        options = {k: v for k, v in locals().items() if k not in ("self", "load_dir", "tag")}
        root, topology = Path(load_dir), self.exchange.topology
        if self.exchange.finished:  # nobody to agree with
            return self.load_from(folder_of(root, topology), tag, options)
        choice = self._choose(root, None if tag is None else str(tag))
        if choice.tag is None:
            return self.load_from(folder_of(root, topology), tag, options)
        fresh = load_module_only or not load_optimizer_states
        saved = self._together(lambda: self._open(choice)) if choice.parts and not fresh else None
        result = self._load(choice, options)
        state = self._together(lambda: saved.state_for(self.exchange)) if saved is not None else None
        if state is None and self.first:
            place, why = choice.sources[0][0] / choice.tag, "without optimizer states" if fresh else "and holds no exchange state"
            log.warning("%s was loaded %s: the channels start anew, from the weights of one replica", place, why)
        self.exchange.rejoin(state, self.engine.global_steps, self.engine.module)
        return result

    def _open(self, choice: Choice) -> Saved:
        """The exchange's parts, of this run's preset and model."""
        saved = open_exchange(*choice.parts)
        try:
            saved.check(self.exchange)
        except ValueError as error:
            raise ValueError(f"{error}; {CURE}") from None
        return saved

    def _together(self, work: Callable[[], T]) -> T:
        """What `work` gives; an error of one rank is raised on all."""
        out, error = None, None
        try:
            out = work()
        except Exception as e:
            error = e
        self.all_well(error, "another rank cannot read its part of the exchange's state")
        return cast(T, out)

    def _choose(self, root: Path, tag: str | None) -> Choice:
        """The first ranks of all replicas tell each other what they see; then each replica's ranks hear from theirs."""
        topology = self.exchange.topology

        def agreed() -> Any:
            board = Board(topology)
            try:
                found = choose_tag(board.meet(look(root, topology, tag)))
            finally:
                board.close()
            if found is None:
                return None
            choice = choose(root, topology, *found)
            return [choice.tag, [[str(f), w] for f, w in choice.sources], [str(f) for f in choice.parts]]

        found = self.from_first(agreed)
        if found is None:
            return Choice(None, [])
        name, sources, parts = found
        choice = Choice(name, [(Path(f), w) for f, w in sources], [Path(f) for f in parts])
        if self.first and (len(sources) > 1 or choice.parts and choice.sources[0][0] != folder_of(root, topology)):
            what = " and ".join(f"{w:.3g} of {f.name or f}" for f, w in choice.sources)
            log.warning("%s takes over %s in %s: %s", topology.name, name, root, what)
        return choice

    def _load(self, choice: Choice, options: dict[str, Any]) -> Any:
        """DeepSpeed's load from one replica, or the mean of several: of masters and inner optimizer states, where replicas differ."""
        sources = choice.sources
        if all(c.channel.before_step for c in self.exchange.channels):
            sources = sources[:1]
        mean: list[torch.Tensor] = []
        total, result = 0.0, None
        for folder, weight in reversed(sources):  # the first one last: what has no mean is its own
            result = self.load_from(folder, choice.tag, options)
            if len(sources) > 1:
                total += weight
                now = self._tensors()
                mean = [_mixed(m, t, weight / total) for m, t in zip(mean, now, strict=True)] if mean else [t.cpu().clone() for t in now]
        for t, m in zip(self._tensors() if mean else [], mean, strict=True):
            t.copy_(m)
        if mean:
            self.exchange.shards.commit()
        return result

    def _tensors(self) -> list[torch.Tensor]:
        """Masters, and the states that the inner optimizer keeps for them."""
        shards: Any = self.exchange.shards
        states = [state[k] for _, state in shards.optimizer_states() for k in sorted(state)]
        return [m.detach() for m in shards.partitions.masters()] + [s for s in states if isinstance(s, torch.Tensor)]


def _mixed(mean: torch.Tensor, now: torch.Tensor, share: float) -> torch.Tensor:
    """`mean` moved by `share` towards another replica's tensor: equal ones stay as they are. Of counters the largest."""
    now = now.cpu()
    return torch.maximum(mean, now) if now.dim() == 0 else mean.add_(now - mean, alpha=share)
