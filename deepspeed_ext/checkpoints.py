"""DeepSpeed's checkpoints, one folder per replica, with the exchange's state in them.

DeepSpeed names its files by the rank inside the node: replicas that share a directory would
overwrite each other. So every replica has a folder with DeepSpeed's standard layout inside
(`zero_to_fp32.py FOLDER` works on each), and a `latest` of its own, which is written when all else
is there. What lies where, and who loads what: `checkpoint_choice.py`.

Source of the facts: deepspeed 0.19.8, `runtime/engine.py` (`save_checkpoint`, `load_checkpoint`):
only rank 0 of the world writes `latest`, the recovery scripts and the names of tied parameters; the
tag is compared over the world; `clip_grad` is saved and restored.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from fsdp_demo import Exchange
from fsdp_demo.checkpoint import SavedExchange, load_exchange, save_exchange
from fsdp_demo.checkpoint.exchange_state import method_of
from fsdp_demo.checkpoint.failures import SaveFailures
from fsdp_demo.checkpoint.fence import Fence
from fsdp_demo.checkpoint.finite import refuse_exchange
from fsdp_demo.checkpoint.folders import damaged, misfits
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.checkpoint.taking_over import LARGEST, begins_anew
from fsdp_demo.config.auto import undecided
from fsdp_demo.errors import NeedsDecision, NotFinite

from .checkpoint_choice import CURE, Choice, choose, choose_tags, folder_of, latest, look
from .checkpoint_folders import Folders
from .taking_over import advance, of_users

log = logging.getLogger("fsdp_demo")

READS = "reading the parts of the exchange's state"


def follow(engine: Any, exchange: Exchange) -> None:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` keep a folder per replica with the
    exchange's state in it.

    `load_checkpoint` is called by all replicas together, like `attach`. With
    `load_optimizer_states=False` or `load_module_only=True` the channels start anew from the loaded
    weights.

    Raises:
        ValueError: the engine writes its files in the background.
    """
    followed = _Followed(engine, exchange)
    _install(engine, followed)
    engine.save_16bit_model = followed.save_16bit_model


def separate(engine: Any, replica: int) -> None:
    """In a mesh: let replica 0 save to and load from the directory itself, replica r from
    `DIR/replica<r>`, without the exchange's state.

    For hosts that keep the exchange's state elsewhere (the Trainer). `follow` takes its place. A
    replica without a folder loads that of replica 0.

    Raises:
        ValueError: the engine writes its files in the background.
    """
    _install(engine, _Separate(engine, replica))


def _install(engine: Any, folders: _Separate | _Followed) -> None:
    if engine.checkpoint_engine.is_decoupled():
        raise ValueError(
            "checkpoint.writer.decoupled in DeepSpeed's configuration: files are written while "
            "training goes on, and the exchange's state "
            "would be beside files that are not there yet. Set it to false, or attach(..., "
            "checkpoints=False)"
        )
    engine.save_checkpoint = folders.save_checkpoint
    engine.load_checkpoint = folders.load_checkpoint
    engine._get_shared_params = folders.tied  # DeepSpeed knows them on rank 0 of the world only


class _Separate(Folders):
    def __init__(self, engine: Any, replica: int):
        super().__init__(engine)
        self.replica = replica

    def _folder(self, root: Path) -> Path:
        return root / f"replica{self.replica}" if self.replica else root

    def save(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, into this replica's folder."""
        return self.save_into(self._folder(root), tag, options)

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, from this replica's folder. The tag is that of replica 0."""
        tag = self.world.from_first(lambda: latest(root)) if tag is None else str(tag)
        own = self._folder(root)
        if tag is not None and not self.ranks.from_first(lambda: (own / str(tag)).is_dir()):
            if self.first:
                log.warning(
                    "%s is not there: replica %d takes over from replica 0", own / tag, self.replica
                )
            own = root
        return self.load_from(own, tag, options)


class _Followed(Folders):
    def __init__(self, engine: Any, exchange: Exchange):
        super().__init__(engine)
        self.exchange = exchange
        self._failures = SaveFailures(exchange.topology.name)
        self._fence: Fence | None = None

    def save(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, into `root/<name of the replica>`, with the exchange's state. False:
        nothing was saved, since a file cannot be written or values are not finite: a warning
        until the third time in a row.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank.
            Superseded: the folder belongs to a later life.
        """
        if self.exchange.shows_result:
            raise RuntimeError(
                "save_checkpoint inside outer_parameters would save these as the replica's own: "
                "leave the context first"
            )
        folder = folder_of(root, self.exchange.topology)
        parts = partial(save_exchange, exchange=self.exchange)
        try:
            self._own(folder)
            self.world.together(self._check, str(folder))
            done = self.save_into(folder, tag, options, parts)
        except (OSError, NotFinite) as error:
            tag = str(tag) if tag is not None else f"global_step{self.engine.global_steps}"
            if self.first and misfits(folder / tag):
                # a disk that is full needs the room
                shutil.rmtree(folder / tag, ignore_errors=True)
            self._failures.failed("no checkpoint saved", error, speaks=self.first)
            return False
        self._failures.made()
        return done

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """As DeepSpeed's, into `save_dir/<name of the replica>`: all would write one file. Within
        `outer_parameters` it saves what is shown.
        """
        folder = folder_of(Path(save_dir), self.exchange.topology)
        return type(self.engine).save_16bit_model(
            self.engine, str(folder), save_filename, exclude_frozen_parameters
        )

    def _own(self, folder: Path) -> None:
        """This life writes into the folder from now on: at its first save, and when it has loaded
        from there.
        """
        if self._fence is None or self._fence.root != folder:
            fence = Fence(folder, self.exchange.topology.run)
            # in a mesh replicas have locks of their own
            self.world.together(lambda: fence.take(self.ranks), str(folder))
            self._fence = fence

    def fenced(self) -> None:
        """Raise where the folder belongs to a later life."""
        if self._fence is not None:
            self._fence.check()

    def _check(self) -> None:
        """No checkpoint of a later life's folder, of a broken exchange, or of values that are not
        finite.
        """
        self.fenced()
        refuse_exchange(self.exchange)

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, and the exchange goes on from its saved state. All replicas call it
        together, at the same step.

        Without a tag all load the newest that all hold whole. A replica that sees no whole one
        takes over from the others: parameters and the exchange's shared state come from them, the
        engine's counters and scheduler go to their step, and what is returned is a path in its own
        folder, where nothing is yet, and the `client_state` of one of them as far as it is plain
        JSON. A replica that has joined a run under way has what the others have: nothing is loaded.

        Raises:
            ValueError: no checkpoint in common, one that is half-written, or of another preset,
                model or number of ranks per replica.
            PeerLost: replicas that did not come in time.
        """
        topology = self.exchange.topology
        if self.exchange.newcomer:  # all that lies here is older than what the others have
            if self.first:
                log.info("%s has joined a run under way: no checkpoint is loaded", topology.name)
            self._own(folder_of(root, topology))
            return None, {}
        if self.exchange.finished:  # nobody to agree with
            return self.load_from(folder_of(root, topology), tag, options)
        choice = self._choose(root, None if tag is None else str(tag))
        if choice.tag is None:
            return self.load_from(folder_of(root, topology), tag, options)
        if not choice.alone and options["load_module_only"]:
            raise NeedsDecision(
                "load_module_only: no replica takes over weights alone, and some see no "
                "checkpoint: copy the folder of one replica there"
            )
        if not choice.sources:
            return self._take_over(folder_of(root, topology), choice.tag)
        self.world.together(lambda: self._verify(choice), READS)
        fresh = options["load_module_only"] or not options["load_optimizer_states"]
        saved: SavedExchange | None = None
        if choice.parts and not fresh:
            found = self.world.together(lambda: load_exchange(*choice.parts), READS)
            self._go_on(found.heads[0])
            saved = self.world.together(lambda: self._fitting(found), READS)
        result = self._load(choice, options)
        state = (
            self.world.together(lambda: saved.state_for(self.exchange), READS)
            if saved is not None
            else None
        )
        if state is None and self.first:
            place = choice.sources[0][0] / choice.tag
            why = "without optimizer states" if fresh else "and holds no exchange state"
            log.warning(
                "%s was loaded %s: the channels start anew, from the weights of one replica",
                place,
                why,
            )
        if not choice.alone:
            self._tell(result[1] or {})
        self.exchange.rejoin(state, self.engine.global_steps, self.engine.module)
        if not choice.alone:  # one of an earlier step has taken over, too
            advance(self.engine, self.exchange.step)
        self._own(folder_of(root, topology))
        return result

    def _take_over(self, folder: Path, tag: str) -> tuple[str, dict[str, Any]]:
        """What the others bring, at their step: nothing is loaded here."""
        note = self._tell(None)
        self._go_on(note["method"])
        self.exchange.rejoin(None, 0, self.engine.module)
        advance(self.engine, self.exchange.step)
        self._own(folder)
        if self.first:
            left = (
                (
                    f"; without {', '.join(note['left'])}, which are not plain JSON of at most "
                    f"{LARGEST} bytes"
                )
                if note["left"]
                else ""
            )
            text = (
                "%s: %s holds no whole checkpoint: took over step %d from %s, with its "
                "client_state%s; %s"
            )
            name, anew = self.exchange.topology.name, begins_anew(self.exchange.config)
            log.warning(text, name, folder, self.exchange.step, note["name"], left, anew)
        return str(folder / tag), note["client"]

    def _tell(self, client: dict[str, Any] | None) -> dict[str, Any]:
        """Where some replicas take over: the note of the first one that does not. `client`: what
        was loaded here, None for nothing.
        """
        topology = self.exchange.topology
        told, left = (None, []) if client is None else of_users(client)

        note = {"name": topology.name, "client": told, "left": left}
        note["method"] = method_of(self.exchange)

        def notes() -> Any:
            registry = CheckpointRegistry(topology)
            try:
                return next(n for n in registry.meet(note) if n["client"] is not None)
            finally:
                registry.close()

        return cast(dict[str, Any], self.ranks.from_first(notes))

    def _verify(self, choice: Choice) -> None:
        """Compare checksums, each rank its share."""
        for folder, _ in choice.sources:
            place = folder / str(choice.tag)
            if bad := damaged(place, self.ranks.rank, self.ranks.world):
                raise ValueError(
                    f"{place} is damaged ({', '.join(bad[:4])}: checksum does not fit): move this "
                    f"folder away; {CURE}"
                )

    def _go_on(self, told: dict[str, Any]) -> None:
        """With the method that the run has chosen before, if it is to be chosen here (`auto`)."""
        if undecided(self.exchange.config):
            from fsdp_demo import automatic  # with the planner

            automatic.go_on(self.exchange, told, self.engine.module)

    def _fitting(self, saved: SavedExchange) -> SavedExchange:
        """The exchange's parts, of this run's preset and model."""
        try:
            saved.check(self.exchange)
        except ValueError as error:
            raise ValueError(f"{error}; {CURE}") from None
        return saved

    def _choose(self, root: Path, tag: str | None) -> Choice:
        """The first ranks of all replicas tell each other what they see; then each replica's ranks
        hear from theirs.
        """
        topology = self.exchange.topology

        def agreed() -> Any:
            registry = CheckpointRegistry(topology)
            try:
                found = choose_tags(
                    registry.meet(look(root, topology, tag)),
                    topology.kind == "islands",
                    topology.starters if topology.elastic else None,
                )
            finally:
                registry.close()
            if found is None:
                return None
            mine = found[topology.starters.index(topology.island)]
            choice = (
                Choice(next(f[0] for f in found if f is not None), [])
                if mine is None
                else choose(root, topology, *mine)
            )
            return [
                choice.tag,
                [[str(f), w] for f, w in choice.sources],
                [str(f) for f in choice.parts],
                None not in found,
            ]

        found = self.ranks.from_first(agreed)
        if found is None:
            return Choice(None, [])
        name, sources, parts, alone = found
        choice = Choice(name, [(Path(f), w) for f, w in sources], [Path(f) for f in parts], alone)
        if (
            self.first
            and sources
            and (
                len(sources) > 1
                or choice.parts
                and choice.sources[0][0] != folder_of(root, topology)
            )
        ):
            what = " and ".join(f"{w:.3g} of {f.name or f}" for f, w in choice.sources)
            log.warning("%s takes over %s in %s: %s", topology.name, name, root, what)
        return choice

    def _load(self, choice: Choice, options: dict[str, Any]) -> Any:
        """DeepSpeed's load from one replica, or the mean of several: of masters and inner optimizer
        states, where replicas differ.
        """
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
                mean = (
                    [_mixed(m, t, weight / total) for m, t in zip(mean, now, strict=True)]
                    if mean
                    else [t.cpu().clone() for t in now]
                )
        for t, m in zip(self._tensors() if mean else [], mean, strict=True):
            t.copy_(m)
        if mean:
            self.exchange.host.commit()
        return result

    def _tensors(self) -> list[torch.Tensor]:
        """Masters, and the states that the inner optimizer keeps for them."""
        host: Any = self.exchange.host
        states = [state[k] for _, state in host.optimizer_states() for k in sorted(state)]
        return [m.detach() for m in host.partitions.masters()] + [
            s for s in states if isinstance(s, torch.Tensor)
        ]


def _mixed(mean: torch.Tensor, now: torch.Tensor, share: float) -> torch.Tensor:
    """`mean` moved by `share` towards another replica's tensor: equal ones stay as they are. Of
    counters the largest.
    """
    now = now.cpu()
    return torch.maximum(mean, now) if now.dim() == 0 else mean.add_(now - mean, alpha=share)
