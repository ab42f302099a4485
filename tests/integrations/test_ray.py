"""Workers of Ray Train as islands, on this machine: lost and back, stopped, resumed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.train", reason="pip install -e '.[ray]'")

import ray  # noqa: E402
from ray import init as ray_init  # noqa: E402
from ray.train import DataConfig, FailureConfig, RunConfig  # noqa: E402

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
    """The function of the page, slower. Those of `dies`, islands and ranks, end by SIGKILL in the
    midst of their first life; each worker says in `out<island>.<rank>` what it has seen."""

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
            (folder / f"begun{name}").touch()
            seen["alive"].add(alive := exchange.metrics()["alive"])
            time.sleep(0.02 if alive > 1 else 0.3)
            mine = [topology.island, topology.rank] in config.get("dies", [])
            if mine and not life and exchange.step == 25:
                os.kill(os.getpid(), signal.SIGKILL)

        attach = fsdp_demo.attach

        def attached(*args: Any, **kwargs: Any) -> Any:
            exchange = attach(*args, **kwargs)
            seen["first"] = exchange.step
            args[0].register_step_post_hook(lambda *_: after(exchange))
            return exchange

        fsdp_demo.attach, ray.train.report = attached, counted
        torch.manual_seed(0)  # ranks of an island begin alike
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
    islands.fit(page(tmp_path, dies=[[1, 0]], steps=400))
    stayed, back = said(tmp_path)["0.0"], said(tmp_path)["1.0"]
    assert stayed.alive == [1, 2] and stayed.life == 0 and stayed.first == 0
    assert back.life == 1 and 25 < back.first < 400 and back.alive == [2]
    assert stayed.step == back.step == 400 and stayed.equal and back.equal
    assert 0 < back.reported == stayed.reported < 10
    assert back.bytes >= 8 * (400 - back.first) // 10  # a weight and a bias each time
    assert not set(stayed.rows) & set(back.rows) and len(stayed.rows + back.rows) == 200


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_islands_of_two_workers(cluster: None, tmp_path: Path) -> None:
    """Two workers are an island with a world of their own; both are killed at once, where ray 2.60
    would end the run, and come back."""
    trainer = page(tmp_path, dies=[[1, 0], [1, 1]], steps=400)
    trainer.backend_config.workers = 2
    trainer.scaling_config.num_workers = 4
    trainer.scaling_config.resources_per_worker = {"CPU": 0.5}
    islands.fit(trainer)
    found = said(tmp_path)
    assert sorted(found) == ["0.0", "0.1", "1.0", "1.1"]
    assert all(w.ranks == 2 and w.equal and w.step == 400 for w in found.values())
    assert found["0.0"].alive == [1, 2] and found["0.0"].life == found["0.1"].life == 0
    assert found["1.0"].life == found["1.1"].life == 1 and found["1.0"].first > 25


def stop_once(folder: Path, begun: str) -> None:
    """SIGTERM to this process, soon after there are two files `begun`."""

    def wait() -> None:
        while len(list(folder.glob(begun))) < 2:
            time.sleep(0.2)
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def saved_steps(folder: Path) -> list[int]:
    """The newest step of each island."""
    return [max(int(c.name[11:]) for c in folder.glob(f"island{i}/checkpoint-*")) for i in (0, 1)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_stop_and_resume(cluster: None, tmp_path: Path) -> None:
    """SIGTERM to the driver, as of `ray job stop`, stops all islands in order: they save, `fit`
    returns, and the same trainer goes on from there."""
    stop_once(tmp_path, "begun*")
    islands.fit(page(tmp_path, steps=100_000))
    saved = saved_steps(tmp_path)  # between the same two exchanges they may be unlike
    end = max(saved) + 60
    assert min(saved) > 0 and not said(tmp_path)
    islands.fit(page(tmp_path, steps=end))
    found = said(tmp_path)
    assert [w.first for w in found.values()] == saved
    assert all(w.step == end and w.equal and w.reported for w in found.values())


def of_trainer(_: Any) -> Any:
    """A train function with a Trainer of transformers."""

    def run(config: dict[str, Any]) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

        import fsdp_demo
        from fsdp_demo.integrations.trainer import ExchangeCallback

        torch.manual_seed(1)
        topology, folder = fsdp_demo.Topology.from_env(), Path(config["folder"])
        small = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**small, **heads))
        ids = torch.arange(topology.island, 64, 2)[:, None] + torch.arange(8)
        rows = [{"input_ids": row % 32, "labels": row % 32} for row in ids]
        args = TrainingArguments(
            folder, max_steps=config["steps"], use_cpu=True, report_to=[], save_steps=500
        )
        begun = (folder / f"begun{topology.island}").touch
        model.register_forward_pre_hook(lambda *_: begun())
        callback = ExchangeCallback("diloco", period=5)
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[callback])
        trainer.train(resume_from_checkpoint="auto")
        digest = sum(float(p.detach().double().sum()) for p in model.parameters())
        step, sent = trainer.state.global_step, callback.exchange.metrics()["bytes_sent"]
        (folder / f"out{topology.island}").write_text(json.dumps([step, digest, sent > 0]))

    return run


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_runs_a_trainer_of_transformers(cluster: None, tmp_path: Path) -> None:
    """A Trainer in a train function takes the callback, stops in order, and resumes."""
    stop_once(tmp_path, "begun*")
    islands.fit(page(tmp_path, of_trainer, steps=100_000))
    end = max(saved_steps(tmp_path)) + 10
    assert end > 10 and not list(tmp_path.glob("out*"))
    islands.fit(page(tmp_path, of_trainer, steps=end))
    first, second = (json.loads((tmp_path / f"out{i}").read_text()) for i in range(2))
    assert first == second and first[::2] == [end, True]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"number": 3, "workers": 2}, "num_workers=3: give a multiple of 2, an island's workers"),
        ({"elastic": True}, "an elastic num_workers: give a number"),
        ({"named": {"train"}}, r"datasets=\['train'\], dealt to all workers in step"),
    ],
)
def test_ray_refusals(changes: dict[str, Any], text: str) -> None:
    """What cannot work is refused in a sentence, when the workers have started."""
    with pytest.raises(ValueError, match=text):
        begin(**changes)
    with pytest.raises(ValueError, match="workers=0, RAY_TRAIN_V2_ENABLED=1"):
        islands.IslandTorchConfig(workers=0)


def begin(
    number: int = 2,
    workers: int = 1,
    elastic: bool = False,
    named: frozenset[str] = frozenset(),
    most: int = 1,
) -> Any:
    """What the backend has when it has begun with such a group."""
    run = SimpleNamespace(
        run_config=RunConfig(failure_config=FailureConfig(max_failures=most)),
        scaling_config=SimpleNamespace(elasticity_enabled=elastic),
        dataset_config=DataConfig(),
    )

    class Group:
        _train_run_context = run

        def __len__(self) -> int:
            return number

        def execute_single(self, *_: Any) -> Any:
            return SimpleNamespace(_dataset_names=set(named))

    backend = islands._Backend()
    backend._actor, backend._env = "there", {}
    backend._begin(Group(), islands.IslandTorchConfig(workers=workers))
    return backend


def test_ray_says_where_nobody_comes_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """max_failures=0 is said, and then Ray may split the datasets; Ray Train v1 is refused."""
    backend = begin(4, 2, named=frozenset({"train"}), most=0)
    assert backend._env["ISLAND_COUNT"] == "2" and backend._env["ISLAND_RUN"].endswith(".1")
    assert "max_failures=0: when an island is lost Ray ends the run" in caplog.text
    monkeypatch.setenv("RAY_TRAIN_V2_ENABLED", "0")
    with pytest.raises(ValueError, match="RAY_TRAIN_V2_ENABLED=0"):
        islands.IslandTorchConfig()
