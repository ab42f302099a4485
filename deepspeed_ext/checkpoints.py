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
from fsdp_demo.checkpoint.files import FRESH, refuse_exchange
from fsdp_demo.checkpoint.folders import MANIFEST
from fsdp_demo.checkpoint.manager import ResumePoint
from fsdp_demo.checkpoint.registry import CheckpointRegistry, refuse_damaged
from fsdp_demo.checkpoint.reshard import stretches
from fsdp_demo.checkpoint.taking_over import LARGEST, begins_anew, forward, small
from fsdp_demo.config.auto import method_note, undecided
from fsdp_demo.errors import NeedsDecision, see

from .checkpoint_methods import ReplicaCheckpoints, latest

log = logging.getLogger("fsdp_demo")

OF_DEEPSPEED = set(
    "buffer_names param_shapes frozen_param_shapes shared_params frozen_param_fragments ds_config"
    " ds_version optimizer lr_scheduler sparse_tensor_module_names global_samples"
    " checkpoint_parallel_dimensions".split()
)
"""What deepspeed 0.19.8 leaves in the `client_state` that it returns, beside that of users."""


def advance(engine: Any, step: int) -> None:
    """Set an engine's counters and scheduler to `step`, as if it had taken all steps up to it."""
    taken = step - engine.global_steps
    if not taken:
        return
    engine.global_steps = step
    engine.global_samples += taken * engine.train_batch_size()
    if engine.lr_scheduler is not None:
        forward(engine.lr_scheduler, taken)


PARTS = "exchange"
CURE = "with DeepSpeed: engine.load_checkpoint(FOLDER OF ONE REPLICA) before attach starts it anew"
READS = "reading the parts of the exchange's state"


def follow(engine: Any, exchange: Exchange, remote: str | None = None) -> None:
    """Let `engine.save_checkpoint` and `engine.load_checkpoint` keep a folder per replica with the
    exchange's state in it, and copies in `remote` below the directory's name.

    `load_checkpoint` is called by all replicas together, like `attach`. With
    `load_optimizer_states=False` or `load_module_only=True` the channels start anew from the loaded
    weights.

    Raises:
        ValueError: the engine writes its files in the background.
    """
    followed = _Followed(engine, exchange, remote)
    followed.install()
    engine.save_16bit_model = followed.save_16bit_model


def folder_of(root: Path, topology: Topology) -> Path:
    """The folder of a replica's checkpoints in the directory that the user names, `root`. A single
    replica has `root` itself, unless it was one of several before.
    """
    own = root / topology.name
    alone = topology.islands == 1 and not any(own.glob(f"*/{MANIFEST}"))
    return root if alone else own


class _Followed(ReplicaCheckpoints):
    """Checkpoints of a replica with the exchange's state (`follow`)."""

    def __init__(self, engine: Any, exchange: Exchange, remote: str | None = None):
        super().__init__(engine, exchange.topology.island)
        self.exchange, self._remote = exchange, remote
        # made by all replicas together, unlike the manager
        self._registry = CheckpointRegistry(exchange.topology, self.ranks)
        self._made: CheckpointManager | None = None

    def _manager(self, root: Path) -> CheckpointManager:
        """The manager, at one directory. It removes no old tag: users have chosen their names."""
        folder = folder_of(root, self.exchange.topology)
        if self._made is None:
            self._made = CheckpointManager(
                folder,
                self.exchange.topology,
                keep=None,
                registry=self._registry,
                votes=self.world,  # DeepSpeed saves with collectives of all
                rotates=False,
                remote=self._remote,
                below=root.name,
            )
        elif folder != self._made.root:
            self._made.enter(folder, root.name)
        return self._made

    def save(self, root: Path, tag: str, options: dict[str, Any]) -> Any:
        """Save as DeepSpeed does, into `root/<name of the replica>`, with the exchange's state.
        False, with a warning, where a file cannot be written or values are not finite; the third
        time in a row this raises.

        Raises:
            PeerLost: what was under way in the exchange is lost, on any rank.
            Superseded: the folder belongs to a later life.
        """
        if self.exchange.shows_result:
            raise RuntimeError(
                "save_checkpoint inside outer_parameters would save these as the replica's own: "
                "leave the context first"
            )
        manager = self._manager(root)
        folder = manager.root

        def write(place: Path) -> None:
            self.world.together(lambda: refuse_exchange(self.exchange), str(place))
            self.write(folder, tag, options)
            save_exchange(place / PARTS, exchange=self.exchange)

        made = manager.save(self.engine.global_steps, write, name=tag)
        if made:
            self.name(folder, tag, options)
        return made

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """Save as DeepSpeed, into `save_dir/<name of the replica>`, as all write one file."""
        folder = folder_of(Path(save_dir), self.exchange.topology)
        return type(self.engine).save_16bit_model(
            self.engine, str(folder), save_filename, exclude_frozen_parameters
        )

    def load(self, root: Path, tag: str | None, options: dict[str, Any]) -> Any:
        """Load as DeepSpeed does, and let the exchange go on from its saved state. All replicas
        call it together, at the same step.

        Without a tag all load the newest that all hold whole, or each the newest of its own between
        the same exchanges. An island that holds no whole one takes over from the others: it has
        their state at their step, and returns a path in its own folder, where nothing is yet, and
        the `client_state` of one of them as far as it is plain JSON. A replica that has joined a
        run under way loads nothing. What another number of ranks has saved is loaded as weights,
        and the channels start anew, as from a checkpoint of plain DeepSpeed in `root`.

        Raises:
            ValueError: no checkpoint in common, one that is damaged, or of another preset or model.
            PeerLost: replicas that did not come in time.
        """
        topology, manager = self.exchange.topology, self._manager(root)
        if self.exchange.newcomer:  # all that lies here is older than what the others have
            if self.first:
                log.info("%s has joined a run under way: no checkpoint is loaded", topology.name)
            manager.own()
            return None, {}
        if self.exchange.finished:  # nobody to agree with
            return self.load_from(manager.root, tag, options)
        point, plain = self._choose(manager, root, tag)
        if plain:
            return self._load(manager, root / plain, None, False, options)
        if point is None:
            return self.load_from(manager.root, tag, options)
        if point.tells and options["load_module_only"]:
            raise NeedsDecision(
                "load_module_only: no replica takes over weights alone, and some see no "
                "checkpoint: copy the folder of one replica there"
            )
        if (place := point.folder) is None:
            return self._take_over(manager, tag or f"global_step{point.step}")
        manager.verify(place)
        saved = self.world.together(lambda: load_exchange(place / PARTS), READS)
        return self._load(manager, place, saved, point.tells, options)

    def _load(
        self,
        manager: CheckpointManager,
        place: Path,
        saved: SavedExchange | None,
        tells: bool,
        options: dict[str, Any],
    ) -> Any:
        """Load the checkpoint `saved` of this replica, or one without an exchange (None)."""
        ranks = len(list(place.glob("*optim_states.pt")))
        unlike = self.world.any(ranks != self.ranks.world)
        if unlike:
            options = {**options, "load_optimizer_states": False}
        without = options["load_module_only"] or not options["load_optimizer_states"]
        if saved is not None and not without:
            self._go_on(saved.heads[0])
            self.world.together(lambda: self._fitting(saved), READS)
        result, state = self.load_from(place.parent, place.name, options), None
        if saved is not None and not without:
            state = self.world.together(lambda: saved.state_for(self.exchange), READS)
        elif self.first:
            how = "without optimizer states" if without else "and holds no exchange state"
            if unlike:
                load = self.ranks.world
                how = f"as weights alone, since {ranks} ranks saved it and {load} load it"
            text = "%s was loaded %s: the channels start anew, from the weights of one replica"
            log.warning(text, place, how)
        if tells:
            self._tell(manager, result[1] or {})
        self.exchange.rejoin(state, self.engine.global_steps, self.engine.module)
        manager.own()
        return result

    def _take_over(self, manager: CheckpointManager, tag: str) -> tuple[str, dict[str, Any]]:
        """Go to the step of the other replicas, with their state: nothing is loaded here."""
        note = self._tell(manager, None)
        self._go_on(note["method"])
        self.exchange.rejoin(None, 0, self.engine.module)
        advance(self.engine, self.exchange.step)
        manager.own()
        if self.first:
            left = ", ".join(note["left"])
            without = f"; without {left}, which are not plain JSON of at most {LARGEST} bytes"
            log.warning(
                "%s: %s holds no whole checkpoint: took over step %d from %s, with its "
                "client_state%s; %s",
                *(self.exchange.topology.name, manager.root, self.exchange.step, note["name"]),
                without if left else "",
                begins_anew(self.exchange.config.at(self.exchange.step)),
            )
        return str(manager.root / tag), note["client"]

    def _tell(self, manager: CheckpointManager, client: dict[str, Any] | None) -> dict[str, Any]:
        """Where some replicas take over: the note of the first one that holds a checkpoint. client:
        the `client_state` that was loaded here; None where nothing was.
        """
        if client is None:
            return manager.registry.tell(None)
        of_users = {key: value for key, value in client.items() if key not in OF_DEEPSPEED}
        told = small(of_users)
        left = sorted(str(key) for key in of_users if key not in told)
        method = method_note(self.exchange.config, self.exchange.auto_choice)
        return manager.registry.tell({"client": told, "left": left, "method": method})

    def _go_on(self, told: dict[str, Any]) -> None:
        """Go on with what was settled when the run began: the method under `auto`, the steps at
        which phases begin.

        Args:
            told: the head of an exchange's state, or the `method_note` of another replica.
        """
        if undecided(self.exchange.config) or self.exchange.opened.waits_for_steps:
            from fsdp_demo import automatic  # with the planner

            automatic.go_on(self.exchange, told, self.engine.module)

    def _fitting(self, saved: SavedExchange) -> None:
        """Refuse parts of another preset or model, or of other stretches of the parameters."""
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
    ) -> tuple[ResumePoint | None, str]:
        """From where this replica goes on; or None, and the tag of a checkpoint of plain DeepSpeed
        in `root`, "" for none.

        Raises:
            NeedsDecision: a ValueError: replicas want different tags, or one that not all hold; in
                a mesh not all hold any; they see unlike checkpoints of plain DeepSpeed; all that is
                there is damaged.
            ValueError: nobody holds the tag that was named.
        """
        held = manager.held(tag or "")
        plain = self.ranks.from_first(lambda: _plain(root, manager.root, tag))
        seen = {"seen": sorted({h.step for h in held}), "plain": plain}
        notes = manager.registry.meet({"tag": tag, **seen, "damaged": manager.damaged})
        if len({n["tag"] for n in notes}) > 1:
            both = ", ".join(f"{n['name']}: {n['tag']!r}" for n in notes)
            raise NeedsDecision(
                f"replicas load different tags ({both}): give the same on all, or none (the newest "
                "that all hold)"
            )
        if not any(n["seen"] for n in notes):
            if not any(n["plain"] for n in notes):
                refuse_damaged(notes)
            return None, _agreed_plain(notes, tag)
        named = tag is not None or not manager.topology.elastic
        if named and not all(n["seen"] for n in notes):
            have = "; ".join(
                f"{n['name']}: {(tag or ', '.join(map(str, n['seen']))) if n['seen'] else 'none'}"
                for n in notes
            )
            raise NeedsDecision(
                f"no checkpoint is seen by all replicas ({have}): copy the folder of one replica "
                "into the directory of those that lack it, or name a tag that all have (without a "
                "tag, an island that holds no checkpoint takes over from the others; in a mesh "
                f"none does){see('no-common-checkpoint')}"
            )
        return manager.agree(held, "common" if named else "newest", tag or ""), ""


def _plain(root: Path, own: Path, tag: str | None) -> str:
    """The tag of a checkpoint of plain DeepSpeed, or of a single replica, in `root`; else ""."""
    name = tag or latest(root) or ""
    there = bool(name) and any((root / name).glob("*model_states.pt"))
    return name if there and (root != own or not (root / name / PARTS).is_dir()) else ""


def _agreed_plain(notes: list[dict[str, Any]], tag: str | None) -> str:
    """The tag of plain DeepSpeed that all replicas see; "" where none sees any. Raises
    NeedsDecision: not all see the same; ValueError: nobody sees the tag that was named.
    """
    seen = {n["plain"] for n in notes}
    if len(seen) > 1:
        have = "; ".join(f"{n['name']}: {n['plain'] or 'none'}" for n in notes)
        raise NeedsDecision(
            f"replicas do not see the same checkpoint of plain DeepSpeed ({have}): copy or mount "
            f"it for all{see('no-common-checkpoint')}"
        )
    if tag is not None and seen == {""}:
        raise ValueError(
            f"no replica sees a whole checkpoint {tag!r}: name one that is there, or none (the "
            "newest that all hold)"
        )
    return str(seen.pop())
