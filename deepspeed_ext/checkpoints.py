"""DeepSpeed's checkpoints, one folder per replica, with the exchange's state in them, by the one
saver of `fsdp_demo` (`checkpoint/manager.py`).

    DIR/<name>/TAG/...            DeepSpeed's files of one replica (a replica alone: DIR/TAG)
    DIR/<name>/TAG/exchange/      the exchange's parts
    DIR/<name>/TAG/manifest.json  step, and every file with its size and checksum, written last
    DIR/<name>/latest             the newest TAG, for DeepSpeed's own tools

DeepSpeed names its files by the rank inside the node: replicas that share a directory would
overwrite each other. So every replica has a folder with DeepSpeed's standard layout inside
(`zero_to_fp32.py FOLDER` works on each). Which step each goes on from is the manager's matter; the
manifest of a tag says its step.

Source of the facts: deepspeed 0.19.8, `runtime/engine.py` (`save_checkpoint`, `load_checkpoint`):
only rank 0 of the world writes `latest`, the recovery scripts and the names of tied parameters; the
tag is compared over the world; `clip_grad` is saved and restored.
"""  # noqa: E501

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fsdp_demo import Exchange, Topology
from fsdp_demo.checkpoint import CheckpointManager, SavedExchange, load_exchange, save_exchange
from fsdp_demo.checkpoint.choice import HeldCheckpoint
from fsdp_demo.checkpoint.exchange_state import method_of
from fsdp_demo.checkpoint.files import FRESH, refuse_exchange
from fsdp_demo.checkpoint.folders import MANIFEST
from fsdp_demo.checkpoint.registry import CheckpointRegistry
from fsdp_demo.checkpoint.reshard import stretches
from fsdp_demo.checkpoint.taking_over import LARGEST, begins_anew, forward, small
from fsdp_demo.config.auto import undecided
from fsdp_demo.errors import NeedsDecision, see

from .checkpoint_methods import Methods, latest

log = logging.getLogger("fsdp_demo")

# What a replica that takes over needs of DeepSpeed: the engine's counters and scheduler at their
# place, and the donor's `client_state`.

OF_DEEPSPEED = {
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "ds_config",
    "ds_version",
    "optimizer",
    "lr_scheduler",
    "sparse_tensor_module_names",
    "global_samples",
    "checkpoint_parallel_dimensions",
}
"""What deepspeed 0.19.8 leaves in the `client_state` that it returns, beside what the user has put
there.
"""


def advance(engine: Any, step: int) -> None:
    """Let an engine that has taken over go on from `step`: its counters and its own scheduler, as
    if it had taken the steps up to there.
    """
    taken = step - engine.global_steps
    if not taken:
        return
    engine.global_steps = step
    engine.global_samples += taken * engine.train_batch_size()
    if engine.lr_scheduler is not None:
        forward(engine.lr_scheduler, taken)


def of_users(client: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What users have put into a `client_state`, as far as a note to another replica can hold it;
    and the names of the rest.
    """
    told = small({key: value for key, value in client.items() if key not in OF_DEEPSPEED})
    return told, sorted(str(key) for key in client if key not in told and key not in OF_DEEPSPEED)


PARTS = "exchange"
CURE = "with DeepSpeed: engine.load_checkpoint(FOLDER OF ONE REPLICA) before attach starts it anew"
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


def _install(engine: Any, methods: Methods) -> None:
    if engine.checkpoint_engine.is_decoupled():
        raise ValueError(
            "checkpoint.writer.decoupled in DeepSpeed's configuration: files are written while "
            "training goes on, and the exchange's state "
            "would be beside files that are not there yet. Set it to false, or attach(..., "
            "checkpoints=False)"
        )
    engine.save_checkpoint = methods.save_checkpoint
    engine.load_checkpoint = methods.load_checkpoint
    engine._get_shared_params = methods.tied  # DeepSpeed knows them on rank 0 of the world only


def folder_of(root: Path, topology: Topology) -> Path:
    """Where a replica's checkpoints lie in the directory that the user names: of one that is alone
    in the directory itself, unless it was one of several before.
    """
    own = root / topology.name
    alone = topology.islands == 1 and not any(own.glob(f"*/{MANIFEST}"))
    return root if alone else own


class _Separate(Methods):
    def __init__(self, engine: Any, replica: int):
        super().__init__(engine)
        self.replica = replica

    def _folder(self, root: Path) -> Path:
        return root / f"replica{self.replica}" if self.replica else root

    def save(self, root: Path, tag: str, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, into this replica's folder."""
        folder = self._folder(root)
        what = f"{folder / tag}: it stays unfinished"
        self.world.together(lambda: folder.mkdir(parents=True, exist_ok=True), what)
        done = self.world.together(lambda: self.write(folder, tag, options), what)
        self.name(folder, tag, options)
        return done

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, from this replica's folder. The tag is that of replica 0."""
        tag = self.world.from_first(lambda: latest(root)) if tag is None else tag
        own = self._folder(root)
        if tag is not None and not self.ranks.from_first(lambda: (own / str(tag)).is_dir()):
            if self.first:
                log.warning(
                    "%s is not there: replica %d takes over from replica 0", own / tag, self.replica
                )
            own = root
        return self.load_from(own, tag, options)


class _Followed(Methods):
    def __init__(self, engine: Any, exchange: Exchange):
        super().__init__(engine)
        self.exchange = exchange
        self._managers: dict[Path, CheckpointManager] = {}
        # made by all replicas together, unlike the managers
        self._registry = CheckpointRegistry(exchange.topology, self.ranks)

    def _manager(self, folder: Path) -> CheckpointManager:
        """Of one directory of the user's. No old tag is removed: their names are the user's."""
        if folder not in self._managers:
            manager = CheckpointManager(
                folder, self.exchange.topology, keep=None, own=True, registry=self._registry
            )
            manager.votes = self.world  # DeepSpeed saves with collectives of all
            manager.rotates = False
            self._managers[folder] = manager
        return self._managers[folder]

    def save(self, root: Path, tag: str, options: dict[str, Any]) -> Any:
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

        def write(place: Path) -> None:
            self.world.together(lambda: refuse_exchange(self.exchange), str(place))
            self.write(folder, tag, options)
            save_exchange(place / PARTS, exchange=self.exchange)

        made = self._manager(folder).save(self.engine.global_steps, write, name=tag)
        if made:
            self.name(folder, tag, options)
        return made

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

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """As DeepSpeed's, and the exchange goes on from its saved state. All replicas call it
        together, at the same step.

        Without a tag all load the newest that all hold whole, or each the newest of its own between
        the same exchanges. An island that holds no whole one takes over from the others: parameters
        and the exchange's shared state come from them, the engine's counters and scheduler go to
        their step, and what is returned is a path in its own folder, where nothing is yet, and the
        `client_state` of one of them as far as it is plain JSON. A replica that has joined a run
        under way has what the others have: nothing is loaded. What another number of ranks has
        saved is loaded as weights, and so the channels start anew, as from a checkpoint of plain
        DeepSpeed in `root`.

        Raises:
            ValueError: no checkpoint in common, one that is damaged, or of another preset or model.
            PeerLost: replicas that did not come in time.
        """
        topology = self.exchange.topology
        folder = folder_of(root, topology)
        manager = self._manager(folder)
        if self.exchange.newcomer:  # all that lies here is older than what the others have
            if self.first:
                log.info("%s has joined a run under way: no checkpoint is loaded", topology.name)
            manager.own()
            return None, {}
        if self.exchange.finished:  # nobody to agree with
            return self.load_from(folder, tag, options)
        chosen, plain = self._choose(manager, root, tag)
        if chosen is None and not plain:
            return self.load_from(folder, tag, options)
        if chosen is not None and None in chosen and options["load_module_only"]:
            raise NeedsDecision(
                "load_module_only: no replica takes over weights alone, and some see no "
                "checkpoint: copy the folder of one replica there"
            )
        mine = None if chosen is None else manager.mine(chosen)
        if chosen is not None and mine is None:
            furthest = max(h.step for h in chosen if h is not None)
            return self._take_over(manager, tag or f"global_step{furthest}")
        if mine is None:
            place, saved = root / plain, None
        else:
            whole = self.ranks.from_first(lambda: manager.whole()[mine.step].name)
            place = folder / (tag or whole)
            manager.verify(place)
            saved = self.world.together(lambda: load_exchange(place / PARTS), READS)
        return self._load(manager, place, saved, chosen, options)

    def _load(
        self,
        manager: CheckpointManager,
        place: Path,
        saved: SavedExchange | None,
        chosen: list[HeldCheckpoint | None] | None,
        options: dict[str, Any],
    ) -> Any:
        """From this replica's own folder, or (`saved` is None) one of plain DeepSpeed."""
        ranks = len(list(place.glob("*optim_states.pt")))
        others = self.world.any(ranks != self.ranks.world)
        if others:
            options = {**options, "load_optimizer_states": False}
        fresh = options["load_module_only"] or not options["load_optimizer_states"]
        if saved is not None and not fresh:
            self._go_on(saved.heads[0])
            self.world.together(lambda: self._fitting(saved), READS)
        result, state = self.load_from(place.parent, place.name, options), None
        if saved is not None and not fresh:
            state = self.world.together(lambda: saved.state_for(self.exchange), READS)
        elif self.first:
            log.warning(
                "%s was loaded %s: the channels start anew, from the weights of one replica",
                place,
                f"as weights alone, since {ranks} ranks saved it and {self.ranks.world} load it"
                if others
                else "without optimizer states"
                if fresh
                else "and holds no exchange state",
            )
        taken = chosen is not None and None in chosen
        if taken:
            self._tell(manager, result[1] or {})
        self.exchange.rejoin(state, self.engine.global_steps, self.engine.module)
        manager.own()
        return result

    def _take_over(self, manager: CheckpointManager, tag: str) -> tuple[str, dict[str, Any]]:
        """What the others bring, at their step: nothing is loaded here."""
        note = self._tell(manager, None)
        self._go_on(note["method"])
        self.exchange.rejoin(None, 0, self.engine.module)
        advance(self.engine, self.exchange.step)
        manager.own()
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
            log.warning(text, name, manager.root, self.exchange.step, note["name"], left, anew)
        return str(manager.root / tag), note["client"]

    def _tell(self, manager: CheckpointManager, client: dict[str, Any] | None) -> dict[str, Any]:
        """Where some replicas take over: the note of the first one that does not. `client`: what
        was loaded here, None for nothing.
        """
        if client is None:
            return manager.registry.tell(None)
        told, left = of_users(client)
        return manager.registry.tell(
            {"client": told, "left": left, "method": method_of(self.exchange)}
        )

    def _go_on(self, told: dict[str, Any]) -> None:
        """With what was settled when the run began: the method under `auto`, the steps at which
        phases begin.
        """
        config = self.exchange.config
        if undecided(config) or any(c.later for c in config.channels):
            from fsdp_demo import automatic  # with the planner

            automatic.go_on(self.exchange, told, self.engine.module)

    def _fitting(self, saved: SavedExchange) -> None:
        """Refuse parts of another preset or model, and what DeepSpeed would have to cut anew."""
        try:
            mine = saved.check(self.exchange)
            theirs = saved.head(mine["rank"], saved.islands[0])
            if stretches(theirs) != stretches(mine):
                raise ValueError(
                    f"{saved.folder}: the ranks that saved it held other stretches of the "
                    "parameters, and DeepSpeed does not cut its files anew: give the same ZeRO "
                    f"stage and parameter groups, {FRESH}"
                )
        except ValueError as error:
            raise ValueError(f"{error}; {CURE}") from None

    def _choose(
        self, manager: CheckpointManager, root: Path, tag: str | None
    ) -> tuple[list[HeldCheckpoint | None] | None, str]:
        """From what each replica goes on; or None, and the tag of a checkpoint of plain DeepSpeed
        in `root`, "" for none.

        Raises:
            NeedsDecision: a ValueError: replicas want different tags, or one that not all hold; in
                a mesh not all hold any.
        """
        held = manager.held(tag or "")
        plain = self.ranks.from_first(lambda: _plain(root, manager.root, tag))
        seen = sorted({h.step for h in held})
        notes = manager.registry.meet({"tag": tag, "seen": seen, "plain": plain})
        if len({n["tag"] for n in notes}) > 1:
            both = ", ".join(f"{n['name']}: {n['tag']!r}" for n in notes)
            raise NeedsDecision(
                f"replicas load different tags ({both}): give the same on all, or none (the newest "
                "that all hold)"
            )
        if not any(n["seen"] for n in notes):
            return None, _agreed_plain(notes, tag)
        named = tag is not None or manager.topology.kind != "islands"
        if named and not all(n["seen"] for n in notes):
            have = "; ".join(
                f"{n['name']}: {(tag or ', '.join(map(str, n['seen']))) if n['seen'] else 'none'}"
                for n in notes
            )
            raise NeedsDecision(
                f"no checkpoint is seen by all replicas ({have}): copy the folder of one replica "
                "into the directory of those that lack it, or "
                "name a tag that all have (without a tag, an island that holds no checkpoint takes "
                "over from the others; in a mesh none does)"
                f"{see('no-common-checkpoint')}"
            )
        return manager.agree(held, "common" if named else "newest"), ""


def _plain(root: Path, own: Path, tag: str | None) -> str:
    """The tag in the directory itself that is no replica's own: of DeepSpeed without an exchange,
    or of one replica where there are several now.
    """
    name = tag or latest(root) or ""
    there = bool(name) and any((root / name).glob("*model_states.pt"))
    return name if there and (root != own or not (root / name / PARTS).is_dir()) else ""


def _agreed_plain(notes: list[dict[str, Any]], tag: str | None) -> str:
    """The plain tag that all replicas see; "" where none sees any.

    Raises:
        NeedsDecision: not all see the same.
        ValueError: nobody sees the tag that was named.
    """
    plain = {n["plain"] for n in notes}
    if len(plain) > 1:
        have = "; ".join(f"{n['name']}: {n['plain'] or 'none'}" for n in notes)
        cure = f"copy or mount it for all{see('no-common-checkpoint')}"
        raise NeedsDecision(
            f"replicas do not see the same checkpoint of plain DeepSpeed ({have}): {cure}"
        )
    if tag is not None and plain == {""}:
        raise ValueError(
            f"no replica sees a whole checkpoint {tag!r}: name one that is there, or none (the "
            "newest that all hold)"
        )
    return str(plain.pop())
