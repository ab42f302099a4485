"""Ray Train, whose workers are islands: `TorchTrainer(..., torch_config=IslandTorchConfig())`.

Facts: ray 2.60, `TorchftConfig`, and `WorkerGroup._start_impl`, where each replica group has one
worker; `replace_replica_group` starts one after another. So the workers of an island meet in their
own threads, not in the controller.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import tempfile
import threading
import time
from ctypes import c_ulong, py_object, pythonapi
from dataclasses import dataclass
from typing import Any

import ray.train
from ray.exceptions import RayActorError
from ray.train._internal.utils import get_address_and_port
from ray.train.torch import TorchConfig
from ray.train.torch import config as ray_torch
from ray.train.v2._internal.constants import is_v2_enabled
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from ..errors import Stopped
from ..exchange.exchange import Exchange
from ..net.address import join_address
from ..rendezvous.attempts import Finished, has_joined
from ..status import SAVED, host_thread, leave
from ..store.server import StoreServer, listen

log = logging.getLogger("fsdp_demo")

LOOK = 0.5  # seconds between two questions of a worker to the store's actor
NAMESPACE = "fsdp_demo"  # of that actor, so that other drivers find it


@dataclass
class IslandTorchConfig(TorchConfig):
    """Ray's configuration of torch, for a `TorchTrainer` whose workers are islands. Raises
    ValueError; what does not fit the Trainer is said when it fits, and ends it.

    Args:
        workers: of an island, whose world of torch.distributed they are.
        backend, timeout_s: of that world.
    """

    workers: int = 1

    def __post_init__(self) -> None:
        if not is_v2_enabled() or self.workers < 1:
            raise ValueError(
                f"workers={self.workers}, RAY_TRAIN_V2_ENABLED={int(is_v2_enabled())}: an island "
                "has 1 worker or more, and Ray Train v1 starts no worker alone: set 1"
            )

    backend_cls = property(lambda self: _Backend)
    train_func_context = property(lambda self: _Island)


def report(exchange: Exchange, metrics: dict[str, Any], checkpoint: Any = None) -> bool:
    """Call `ray.train.report`, a barrier over all workers, and return True; False while an island
    is away, as the islands tell each other. All ranks of all islands call this at one step, before
    `finish()` or behind `finish(close=False)`."""
    here = [float(i == exchange.topology.island) for i in range(exchange.topology.islands)]
    if present := all(exchange.across_islands.mean(here)):
        ray.train.report(metrics, checkpoint=checkpoint)
    return present


def stop(name: str) -> None:
    """Stop the run of this `RunConfig.name` in order, from any driver: each island ends its step,
    saves under `guard` and ends its train function. Raises ValueError: no such run is there."""
    ray.get(ray.get_actor(f"store of {name}", NAMESPACE).stop.remote())


def fit(trainer: Any) -> Any:
    """Call `trainer.fit()`, and `stop` when this driver gets SIGTERM, as by `ray job stop`, which
    kills it RAY_JOB_STOP_WAIT_TIME_S later: give the job the seconds of a save."""
    asks: dict[str, Any] = {"target": stop, "args": (trainer.run_config.name,), "daemon": True}
    before = signal.signal(signal.SIGTERM, lambda *_: threading.Thread(**asks).start())
    try:
        return trainer.fit()
    finally:
        signal.signal(signal.SIGTERM, before)


class StoreActor:
    """The store of a run, the wish to stop it, and the place where workers of an island meet."""

    def __init__(self, bind: str, token: str, workers: int, file: str):
        self._workers, self._stops = workers, False
        self._waiting, self._met = dict[str, dict[int, Any]](), dict[str, list[Any]]()
        listener = listen(bind)  # the rest in one thread, as its file needs it
        serve = lambda: StoreServer(listener, file, token).serve_while(lambda: True)  # noqa: E731
        threading.Thread(target=serve, daemon=True).start()

    def stop(self) -> None:
        self._stops = True

    def come(self, island: str, rank: int, said: Any) -> None:
        """Wait, as a worker, for the others of a new start of its island."""
        came = self._waiting.setdefault(island, {})
        came[rank] = said
        if len(came) == self._workers:
            self._met[island] = [came[r] for r in range(self._workers)]
            del self._waiting[island]

    def look(self, island: str) -> tuple[bool, bool, list[Any]]:
        """Whether the run is told to stop, whether workers of the island wait for others of a new
        start, and what those said that met last."""
        return self._stops, island in self._waiting, self._met.get(island, [])


class _Backend(ray_torch._TorchBackend):
    """Gives workers their places: all at first, and later one that was started again."""

    has_replica_groups, _starts = True, 0
    _actor: Any = None

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Give each worker of this group its place, in the controller."""
        config, whole = backend_config, isinstance(worker_group, WorkerGroup)
        if whole:
            self._begin(worker_group, config)
        self._env |= {} if whole and self._starts == 1 else {"ISLAND_RESUME": "auto"}
        gpu = worker_group.get_resources_per_worker().get("GPU", 0)
        world = config.backend or ("nccl" if gpu else "gloo"), config.timeout_s
        placed, provider = [], None if whole else self._provider
        for worker in worker_group.get_workers():
            island, rank = divmod(worker.distributed_context.world_rank, config.workers)
            env = self._env | {"ISLAND_RANK": str(island), "RANK": str(rank)}
            placed.append(worker.execute_async(_take, env, self._actor, world, provider))
        ray.get(placed)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Leave out other dead workers where one is replaced: ray 2.60 would ask them, and end."""
        if isinstance(worker_group, WorkerGroup):
            return super().on_shutdown(worker_group, backend_config)
        for group in filter(lambda g: g.is_active(), self._group.get_replica_groups()):
            try:
                group.execute(os.getpid)
            except RayActorError:
                group._active = False

    def _begin(self, group: Any, config: IslandTorchConfig) -> None:
        """Begin a start of all islands, under a run id of its own."""
        self._group, run, number = group, group._train_run_context, len(group)
        name, most = run.run_config.name, run.run_config.failure_config.max_failures
        self._provider = group.execute_single(0, lambda: get_train_context().dataset_shard_provider)
        named = self._provider._dataset_names if self._provider else set()
        wanted = run.dataset_config._datasets_to_split
        split = sorted(named if wanted == "all" else named & set(wanted))
        checks = {
            f"num_workers={number}: give a multiple of {config.workers}, an island's workers": (
                number % config.workers
            ),
            "an elastic num_workers: give a number": run.scaling_config.elasticity_enabled,
            f"datasets={split}, dealt to all workers in step, so that a lost one stops all: give "
            "each island its own, and DataConfig(datasets_to_split=[])": split and most,
        }
        if found := [text for text, wrong in checks.items() if wrong]:
            raise ValueError(f"IslandTorchConfig found {found[0]}")
        if not most:
            cure = "FailureConfig(max_failures=9) brings it back, while the others train on"
            log.warning("max_failures=0: when an island is lost Ray ends the run. %s", cure)
        if self._actor is None:
            self._start_store(name, config.workers)
        self._starts += 1
        self._env |= {"ISLAND_COUNT": str(number // config.workers)}
        self._env |= {"ISLAND_RUN": f"{name}.{self._starts}", "WORLD_SIZE": str(config.workers)}

    def _start_store(self, name: str, workers: int) -> None:
        """Start the store beside the controller. If it dies, it comes back on its port and file."""
        bind, token = join_address(*get_address_and_port()), secrets.token_hex(32)
        file = os.path.join(tempfile.mkdtemp(prefix="fsdp_demo-"), "store.sqlite")
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        named = {"name": f"store of {name}", "namespace": NAMESPACE, "label_selector": here}
        made = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(StoreActor)
        self._actor = made.options(**named).remote(bind, token, workers, file)
        self._env = {"ISLAND_ENDPOINT": bind, "ISLAND_TOKEN": token}


def _take(env: dict[str, str], actor: Any, world: tuple[str, int], provider: Any) -> None:
    """Take a place, as a worker. provider: of the datasets, for one that was started again: the new
    one of ray 2.60 counts one worker, and has nothing for any but the first."""
    _Island.actor, _Island.world = actor, world
    ray_torch._set_torch_distributed_env_vars()
    os.environ.update(env, ISLAND_ADDRESS=ray.util.get_node_ip_address())
    if provider is not None:
        get_train_context().dataset_shard_provider = provider


class _Island(ray_torch.TorchConfigContextManager):
    """The context of a train function: its island is a world, and a wish to stop ends it."""

    actor: Any = None  # of this process, a worker
    world = "gloo", 1800

    def __enter__(self) -> None:
        super().__enter__()
        host_thread()
        self._thread, self._over = threading.get_ident(), threading.Event()
        self._name = f"{os.environ['ISLAND_RUN']}, island {os.environ['ISLAND_RANK']}"
        self._meet(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    def _look(self) -> tuple[bool, bool, list[Any]]:
        return ray.get(self.actor.look.remote(self._name))

    def _meet(self, rank: int, workers: int) -> None:
        """Make the island's world when all its workers are here."""
        node, end = ray.get_runtime_context().get_node_id(), time.monotonic() + self.world[1]
        said = [*get_address_and_port(), node, secrets.token_hex(4)]
        ray.get(self.actor.come.remote(self._name, rank, said))
        while said not in (met := self._look()[2]):
            if time.monotonic() > end:
                raise RuntimeError(f"not all {workers} workers of this island came (timeout_s)")
            time.sleep(LOOK)
        near = [other[2] for other in met]
        os.environ.update(MASTER_ADDR=met[0][0], MASTER_PORT=str(met[0][1]))
        os.environ["LOCAL_RANK"] = str(near[:rank].count(node))
        os.environ["LOCAL_WORLD_SIZE"] = str(near.count(node))
        threading.Thread(target=self._watch, name="ray stop", daemon=True).start()
        ray_torch._setup_torch_process_group(self.world[0], rank, workers, "env://", self.world[1])

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            stops, torn, _ = self._look()
            if torn:
                log.error("%s has lost a worker: this one ends, and both come back", self._name)
                leave(SAVED)
            if stops and not (has_joined() or os.environ["ISLAND_COUNT"] == "1"):
                pythonapi.PyThreadState_SetAsyncExc(c_ulong(self._thread), py_object(SystemExit))
                return  # else it would wait for others that have ended
            for exchange in _exchanges() if stops else ():
                exchange.request_stop()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self._over.set()
        for exchange in _exchanges() if error else ():
            exchange.detach()
        left = isinstance(error, SystemExit)
        told = (left or isinstance(error, Stopped)) and self._look()[0]
        if left and not told:
            raise RuntimeError(f"{self._name} has ended with status {error.code}: its log says why")
        if done := told or isinstance(error, Finished):
            log.warning("%s ends: %s", self._name, "its run is told to stop" if told else error)
        return done


def _exchanges() -> list[Exchange]:
    """The exchanges of this process that have not ended, whoever made them."""
    found = [e for e in gc.get_objects() if type(e) is Exchange and hasattr(e, "_runtime")]
    return [e for e in found if not e.closed]
