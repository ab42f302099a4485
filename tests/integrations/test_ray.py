"""Workers of Ray Train as islands, on this machine: lost and back, stopped, resumed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train", reason="pip install -e '.[ray]'")

import ray  # noqa: E402
from ray import init as ray_init  # noqa: E402

from fsdp_demo.integrations import ray as islands  # noqa: E402

from ..support import pages  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs/engines.md"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Ray on this machine, as two cores."""
    threads = {"OMP_NUM_THREADS": "1", "ISLAND_DEAD": "5"}
    memory = {"object_store_memory": 100 << 20, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)  # Ray takes it
    ray_init(num_cpus=2, runtime_env={"env_vars": threads}, **memory)
    yield
    ray.shutdown()
    signal.signal(signal.SIGTERM, before)


def page(folder: Path, train: Any = None, **config: Any) -> Any:
    """The trainer of docs/engines.md, with `config` in its own. train: takes the page's function,
    and gives the one that is trained."""
    (block,) = [b for b in pages.blocks(PAGE.read_text()) if "IslandTorchConfig" in b.code]
    head, _, rest = block.code.partition("\nparts = ")
    names: dict[str, Any] = {"folder": str(folder), "__name__": "page"}
    exec(head, names)
    names["train"] = (train or watched)(names["train"])
    exec("parts = " + rest.replace("result = fit(trainer)", ""), names)
    trainer = names["trainer"]
    trainer.run_config.storage_path = str(folder / "ray")
    trainer.train_loop_config.update(config)
    return trainer


def watched(train: Any) -> Any:
    """The function of the page, slower. A worker of island `dies` ends by SIGKILL in the midst, in
    its first life; each says in `out<rank>.<life>` what it has seen."""

    def run(config: dict[str, Any]) -> None:
        import torch

        import fsdp_demo

        topology, folder = fsdp_demo.Topology.from_env(), Path(config["folder"])
        name = f"{topology.island}.{topology.rank}"
        life = len(list(folder.glob(f"life{name}.*")))
        (folder / f"life{name}.{life}").touch()
        seen: dict[str, Any] = {"life": life, "ranks": torch.distributed.get_world_size()}
        seen |= {"reported": 0, "first": -1, "alive": set()}
        kept, report = [], ray.train.report

        def counted(*args: Any, **kwargs: Any) -> None:
            seen["reported"] += 1
            report(*args, **kwargs)

        def after(exchange: Any) -> None:
            """At the end of each step."""
            kept[:] = [exchange]
            seen["alive"].add(exchange.metrics()["alive"])
            time.sleep(config["pause"])
            mine = config.get("dies") == [topology.island, topology.rank]
            if mine and not life and exchange.step == 25:
                os.kill(os.getpid(), signal.SIGKILL)

        attach = fsdp_demo.attach

        def attached(*args: Any, **kwargs: Any) -> Any:
            exchange = attach(*args, **kwargs)
            seen["first"] = exchange.step
            args[0].register_step_post_hook(lambda *_: after(exchange))
            return exchange

        fsdp_demo.attach, ray.train.report = attached, counted
        train(config)
        (exchange,) = kept
        shard = ray.train.get_dataset_shard(f"part{topology.island}")
        seen["rows"] = sorted(row["id"] for row in shard.iter_rows())
        seen |= {"step": exchange.step, "equal": exchange.finished and exchange.digests_equal()}
        seen |= {"alive": sorted(seen["alive"]), "bytes": exchange.metrics()["bytes_sent"]}
        (folder / f"out{name}").write_text(json.dumps(seen))

    return run


def said(folder: Path) -> dict[str, SimpleNamespace]:
    """What the workers have seen, by island and rank."""
    files = sorted(folder.glob("out*"))
    return {f.name[3:]: SimpleNamespace(**json.loads(f.read_text())) for f in files}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_killed_island_comes_back(cluster: None, tmp_path: Path) -> None:
    """A killed worker joins the others, who trained on and reported nothing meanwhile, with the
    rows of its own part; all end with one model."""
    islands.fit(page(tmp_path, pause=0.2, dies=[1, 0], steps=500))
    stayed, back = said(tmp_path)["0.0"], said(tmp_path)["1.0"]
    assert stayed.alive == [1, 2] and stayed.life == 0 and stayed.first == 0
    assert back.life == 1 and 25 < back.first < 500 and back.alive == [2]
    assert stayed.step == back.step == 500 and stayed.equal and back.equal
    assert 0 < back.reported == stayed.reported < 10
    assert back.bytes >= 8 * (500 - back.first) // 10  # a weight and a bias each time
    assert not set(stayed.rows) & set(back.rows) and len(stayed.rows + back.rows) == 200
