"""One world of two nodes x two ranks: ZeRO shards and reduces inside a node, and whatever would
reach further is seen or refused.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3
from deepspeed.utils import groups, safe_get_full_grad
from torch import nn

from deepspeed_ext import node_mesh
from deepspeed_ext.confinement import assert_confined, of_node
from deepspeed_ext.node_mesh import NodeMPU, installed, shard_within_node, topology_of
from fsdp_demo.rendezvous.island import IslandGroup
from fsdp_demo.rendezvous.mesh import meeting_place
from fsdp_demo.rendezvous.position import ShardPosition

from ..support import zero
from ..support.collectives import Recorder
from ..support.heard import heard
from ..support.inside import in_ranks

NODE = 2
NUMEL = sum(p.numel() for p in zero.Model().parameters())
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
CASES = {
    f"{stage}-{'bf16' if bf16 else 'fp32'}": (stage, bf16, {})
    for stage in zero.STAGES
    for bf16 in (False, True)
}
CASES["bf16-optimizer"] = ("zero1", True, BF16_OPTIMIZER)


def before_ranks() -> None:
    """What the ranks import of transformers: once, instead of in every rank."""
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification, Trainer  # noqa: F401
    from transformers.integrations import HfDeepSpeedConfig  # noqa: F401


@pytest.fixture
def world(run_ranks):
    """`world(fn, *args)`: `fn(rank, *args)` on the four ranks of one world."""
    return lambda fn, *args, **options: run_ranks(fn, islands=1, procs=4, args=args, **options)


def error_of(kind: type[BaseException], call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# ---- training ----------------------------------------------------------------------------------


def trained(me, case: str, confined: bool) -> dict[str, Any]:
    stage, bf16, more = CASES[case]
    if confined:
        shard_within_node(NODE)
    made = zero.engine(zero.settings(stage, bf16=bf16, accumulate=2, **more), fast_sgd)
    with Recorder() as seen:
        zero.train(made, range(4), me.rank, accumulate=2)
    return {
        "wrapper": type(made.optimizer).__name__,
        "crossing": seen.crossing(NODE),
        "inside": [e for e in seen.events if len(e.ranks) > 1 and e not in seen.crossing(NODE)],
        "weights": zero.whole(made),
        "sharded": sum(
            p.numel() for g in made.optimizer.optimizer.param_groups for p in g["params"]
        ),
    }


def fast_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def averaged(ranks: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What the ranks of a node make of the model: SGD with the mean of their gradients, in this
    process.
    """
    torch.manual_seed(7)
    model = zero.Model()
    optimizer = fast_sgd(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in ranks:
            for micro in range(2):
                rows, targets = zero.batch(step, rank, micro)
                (nn.functional.cross_entropy(model(rows), targets) / (2 * len(ranks))).backward()
        optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("case", CASES)
def test_zero_mesh_collectives_inside_node(world, case: str) -> None:
    """The collectives of training stay inside the node, and gradients are its mean."""
    out = world(trained, case, True)
    wrapper = {"zero3": "DeepSpeedZeroOptimizer_Stage3", "bf16-": "BF16_Optimizer"}.get(
        case[:5], "DeepSpeedZeroOptimizer"
    )
    for rank, mine in enumerate(out):
        assert mine["wrapper"] == wrapper
        assert mine["crossing"] == []
        assert {e.ranks for e in mine["inside"]} == {(rank // NODE * NODE, rank // NODE * NODE + 1)}
        # gradients and parameters, bf16
        assert sum(e.size for e in mine["inside"]) > 2 * 4 * NUMEL * 2
    for name, value in averaged((0, 1)).items():
        assert torch.equal(out[0]["weights"][name], out[1]["weights"][name])
        limit = 0.02 if CASES[case][1] else 2e-6
        torch.testing.assert_close(out[0]["weights"][name], value, rtol=limit, atol=limit)
    for name, value in averaged((2, 3)).items():
        torch.testing.assert_close(out[2]["weights"][name], value, rtol=limit, atol=limit)
    # replicas go their own ways
    assert not torch.equal(out[0]["weights"]["head.weight"], out[2]["weights"]["head.weight"])


@pytest.mark.parametrize("case", ["zero1-fp32", "zero2-bf16", "zero3-fp32", "bf16-optimizer"])
def test_zero_mesh_recorder_sees_crossing(world, case: str) -> None:
    """Without `shard_within_node` the recorder sees ZeRO reduce between the nodes."""
    out = world(trained, case, False)
    for mine in out:
        assert {e.ranks for e in mine["crossing"]} == {(0, 1, 2, 3)}
        assert sum(e.size for e in mine["crossing"]) > 2 * 4 * NUMEL * 2
        assert mine["inside"] == []


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@in_ranks(1, 4)
def test_zero_mesh_gradient_mean_of_node(me, stage: str) -> None:
    """Gradients are the mean over the ranks of the node."""
    shard_within_node(NODE)
    made = zero.engine(zero.settings(stage), zero.sgd)
    rows, targets = zero.batch(0, me.rank)
    made.backward(nn.functional.cross_entropy(made(rows), targets))
    torch.manual_seed(7)
    model, first = zero.Model(), me.rank // NODE * NODE
    for rank in (first, first + 1):
        rows, targets = zero.batch(0, rank)
        (nn.functional.cross_entropy(model(rows), targets) / 2).backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    for n, p in made.module.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(p), expected[n], rtol=1e-5, atol=1e-7)


def wandering(me) -> list[Any]:
    """Node 1 alone uses a module once more, so that it alone records its fetch order anew."""
    shard_within_node(NODE)
    made = zero.engine(zero.settings("zero3"), zero.sgd)
    for step in range(5):
        rows, targets = zero.batch(step, me.rank)
        out = made(rows)
        if step == 2 and me.rank >= NODE:
            out = out + made.module.embed(rows).sum() * 0
        made.backward(nn.functional.cross_entropy(out, targets))
        made.step()
    same = stage3.assert_ints_same_as_other_ranks
    same([me.rank // NODE, 5])  # equal in the node, different between nodes
    same([])
    wrong = error_of(RuntimeError, same, [1, 2] if me.rank == 3 else [1]) if me.rank >= NODE else ""
    return [made.global_steps, wrong]


def test_zero_mesh_fetch_order(world) -> None:
    """Nodes may fetch parameters in different orders, but not the ranks of one node."""
    out = world(wandering, timeout=40)
    assert [steps for steps, _ in out] == [5] * 4
    for rank in (2, 3):
        assert "the ranks [2, 3] of one node disagree" in out[rank][1]
        assert "1 entries, CRC-32" in out[rank][1]
        assert "2 entries, CRC-32" in out[rank][1]


# ---- ZeRO-3 before there is an engine ----------------------------------------------------------


class Initialised(zero.Model):
    """A model that sets its weights in its constructor, as GPT-like ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self.fill)

    @staticmethod
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


@in_ranks(1, 4)
def test_zero_mesh_zero_init_inside_node(me) -> None:
    """`zero.Init` cuts parameters inside the node."""
    shard_within_node(NODE)
    config = zero.settings("zero3", train_batch_size=16)
    torch.manual_seed(me.rank)
    with Recorder() as seen, deepspeed.zero.Init(config_dict_or_path=config):
        model = Initialised()
    for p in model.parameters():
        ranks = dist.get_process_group_ranks(p.ds_process_group)
        assert ranks == ([0, 1] if me.rank < NODE else [2, 3])
        assert p.ds_tensor.numel() == -(-p.ds_numel // NODE)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    nn.Linear(3, 3).apply(lambda m: None)
    made = zero.engine(config, fast_sgd, model)
    with Recorder() as training:
        zero.train(made, range(3), me.rank)
    assert training.crossing(NODE) == [] and made.train_batch_size() == 8
    # What the constructor set goes from the first replica to the others, and to nobody twice.
    assert {e.ranks for e in seen.crossing(NODE)} <= {(0, 2)}
    assert (seen.crossing(NODE) != []) == (me.rank % NODE == 0)
    for name in ("layers.0.weight", "head.weight"):
        first = weights[name].clone()
        dist.broadcast(first, 0)
        assert torch.equal(weights[name], first) and 0.01 < weights[name].std() < 0.03


def pretrained(me, folder: str, bf16: bool) -> dict[str, Any]:
    from transformers import LlamaForSequenceClassification
    from transformers.integrations import HfDeepSpeedConfig

    config = zero.settings("zero3", bf16=bf16, train_batch_size=16)
    shard_within_node(NODE)
    keep = HfDeepSpeedConfig(config)  # as TrainingArguments do
    torch.manual_seed(me.rank)
    model = LlamaForSequenceClassification.from_pretrained(folder, num_labels=3, pad_token_id=0)
    del keep
    ranks = {tuple(dist.get_process_group_ranks(p.ds_process_group)) for p in model.parameters()}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        weights = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    made = zero.engine(config, fast_sgd, model)
    with Recorder() as seen:
        for step in range(3):
            rows, _ = zero.batch(step, me.rank)
            made.backward(made(input_ids=rows, labels=torch.zeros(4, dtype=torch.long)).loss)
            made.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if me.rank == 0:  # an engine's parameters are its replica's own
            model.score.weight.data.fill_(3.0)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        score = float(model.score.weight.flatten()[0])
    return {"ranks": ranks, "weights": weights, "crossing": seen.crossing(NODE), "score": score}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_zero_mesh_from_pretrained(world, tmp_path: Path, bf16: bool) -> None:
    """`from_pretrained` loads every replica and cuts parameters inside the node."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        vocab_size=37,
        hidden_size=20,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(small)
    model.save_pretrained(tmp_path / "model")
    out = world(pretrained, str(tmp_path / "model"), bf16)
    saved = {n: p.detach() for n, p in model.named_parameters() if not n.startswith("lm_head")}
    for rank, mine in enumerate(out):
        assert mine["ranks"] == {(0, 1) if rank < NODE else (2, 3)} and mine["crossing"] == []
        for name, value in saved.items():
            assert torch.equal(
                mine["weights"][name], value.bfloat16().float() if bf16 else value
            ), name
        # in no file: made on rank 0
        assert torch.equal(mine["weights"]["score.weight"], out[0]["weights"]["score.weight"])
        assert out[0]["weights"]["score.weight"].std() > 0
        assert (mine["score"] == 3.0) == (rank < NODE)


# ---- topology ----------------------------------------------------------------------------------


@in_ranks(1, 4)
def test_zero_mesh_topology_of_engine(me) -> None:
    """The topology of an engine is that of a mesh."""
    assert installed() is None
    nodes = shard_within_node(NODE)
    assert nodes is shard_within_node(NODE) is installed() and isinstance(nodes, NodeMPU)
    made = zero.engine(zero.settings("zero2"), zero.sgd)
    assert made.mpu is nodes
    t, (node, place) = topology_of(made.mpu), divmod(me.rank, NODE)
    assert (t.kind, t.island, t.islands, t.name) == ("mesh", node, 2, f"island{node}")
    assert (t.timeout, t.rank, t.world) == (30.0, place, 2)
    assert dist.get_process_group_ranks(t.group) == [2 * node, 2 * node + 1]
    assert t.meets_at == meeting_place([place, place + 2])
    position = ShardPosition(num_shards=t.world, shard=t.rank)
    island = IslandGroup(t, position)
    line, active_copies = t.join(position)
    brought = line.all_gather(torch.tensor([10 * me.rank], dtype=torch.uint8))
    assert (island.sum(me.rank), island.max(me.rank)) == ([4.0 * node + 1], [2.0 * node + 1])
    assert [int(x) for x in brought] == [10 * place, 10 * (place + 2)]
    assert line.label(1) == "island 1 (island1)" and active_copies == 1


@in_ranks(1, 4)
def test_zero_mesh_nodes_of_one_rank() -> None:
    """Nodes may have one rank."""
    shard_within_node(1)
    alone = topology_of(zero.engine(zero.settings("zero3"), zero.sgd).mpu)
    assert (alone.islands, alone.world, alone.group) == (4, 1, None)
    assert alone.meets_at == meeting_place(range(4))


@in_ranks(1, 4)
def test_zero_mesh_one_node_logged() -> None:
    """A world of one node is allowed, and the log says that nothing is exchanged."""
    records = heard(logging.INFO)
    shard_within_node(4)
    topology = topology_of(zero.engine(zero.settings("zero1"), zero.sgd).mpu)
    assert (topology.kind, topology.islands, topology.world) == ("single", 1, 4)
    assert "inside island0 of 1 nodes: nothing to exchange" in records[0]


# ---- configuration -----------------------------------------------------------------------------


def configured(me) -> dict[str, Any]:
    shard_within_node(NODE)
    comm = zero.settings("zero1", train_batch_size=16)
    file = me.folder / "zero.json"
    if me.rank == 0:
        file.write_text(json.dumps(comm))
    dist.barrier()
    model = zero.Model()
    command = argparse.Namespace(deepspeed_config=str(file), local_rank=me.rank)
    engines = [
        deepspeed.initialize(command, model, zero.sgd(model.parameters()))[0],
        zero.engine(str(file), zero.sgd),
        deepspeed.initialize(
            model=model, optimizer=zero.sgd(model.parameters()), config_params=comm
        )[0],
    ]
    made, _, loader, _ = deepspeed.initialize(
        model=model,
        optimizer=zero.sgd(model.parameters()),
        config=comm,
        training_data=list(range(32)),
        mpu=installed(),
    )
    evaluation = made.deepspeed_io(list(range(8)), route="eval", num_local_io_workers=0)
    return {
        "batch": [e.train_batch_size() for e in [*engines, made]],
        "given": (comm["train_batch_size"], command.deepspeed_config == str(file)),
        "drawn": [int(i) for i in loader.data_sampler],
        "loader": loader is made.training_dataloader,
        "evaluated": [int(i) for i in evaluation.data_sampler],
    }


def test_zero_mesh_batches_of_replicas(world) -> None:
    """Batch sizes are translated, and replicas draw different samples."""
    out = world(configured)
    for rank, mine in enumerate(out):
        assert mine["batch"] == [8] * 4 and mine["given"] == (16, True) and mine["loader"]
        assert mine["evaluated"] == [rank, rank + 4]
    assert sorted(i for mine in out for i in mine["drawn"]) == list(range(32))


@pytest.mark.parametrize(("total", "expected"), [(None, None), (32, 16), ("auto", "auto")])
def test_zero_mesh_train_batch_size_of_node(total: Any, expected: Any) -> None:
    """`train_batch_size` becomes that of the node."""
    given = {"bf16": {}} if total is None else {"train_batch_size": total}
    before = copy.deepcopy(given)
    assert of_node(given, 2).get("train_batch_size") == expected
    assert given == before


def test_zero_mesh_rank_sets_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank selects its own GPU before its first message. DeepSpeed does so only when it makes the
    engine: on NCCL all ranks would speak through the first one.
    """
    taken: list[int] = []
    gpus = SimpleNamespace(
        device_name=lambda: "cuda", device_count=lambda: 4, set_device=taken.append
    )
    monkeypatch.setattr(node_mesh, "get_accelerator", lambda: gpus)
    monkeypatch.setattr(node_mesh, "check_size", lambda size: pytest.fail("far enough"))
    for text in ("3", "4", "", "x"):  # beyond those that this process sees, and no launcher
        monkeypatch.setenv("LOCAL_RANK", text)
        with pytest.raises(pytest.fail.Exception):
            shard_within_node(2)
    assert taken == [3]


def test_zero_mesh_without_process_group_refused() -> None:
    """`shard_within_node` without a process group is refused, and the error says where to
    call it.
    """
    text = error_of(ValueError, shard_within_node, 2)
    assert "torch.distributed is not initialised" in text and "before the model is made" in text
    assert installed() is None and topology_of(object()) is None


class OtherMPU:
    """What somebody else might pass."""


def refused(me) -> dict[str, str]:
    import os

    texts = {str(n): error_of(ValueError, shard_within_node, n) for n in (0, 3, 8, -2, 2.0, True)}
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    texts["local"] = error_of(ValueError, shard_within_node, 4)
    os.environ["ISLAND_TIMEOUT"] = "soon"
    texts["timeout"] = error_of(ValueError, shard_within_node, 2)
    os.environ["ISLAND_TIMEOUT"] = "30"
    shard_within_node(2)
    texts["twice"] = error_of(ValueError, shard_within_node, 1)
    model, config = zero.Model(), zero.settings("zero1")

    def start(kind: type[BaseException], **changed: Any) -> str:
        given = {"config": {**config, **changed.pop("config", {})}, **changed}
        optimizer = zero.sgd(model.parameters())
        return error_of(kind, deepspeed.initialize, model=model, optimizer=optimizer, **given)

    texts["mpu"] = start(ValueError, mpu=OtherMPU())
    texts["mesh"] = start(RuntimeError, mesh_param=(2, 2))
    sequence = {"sequence_parallel_size": 1, "data_parallel_size": 4}
    texts["config"] = start(RuntimeError, config=sequence)
    texts["batch"] = start(ValueError, config={"train_batch_size": 13})
    texts["sizes"] = start(AssertionError, config={"train_batch_size": 12})
    texts["init group"] = error_of(
        ValueError, deepspeed.zero.Init, data_parallel_group=dist.group.WORLD
    )
    texts["init mpu"] = error_of(ValueError, deepspeed.zero.Init, mpu=OtherMPU())
    # DeepSpeed's own: no configuration
    texts["args"] = error_of(AssertionError, deepspeed.initialize, model=model)
    return texts


def test_zero_mesh_bad_input_refused(world) -> None:
    """Bad input is refused with what is allowed."""
    wanted = {
        **dict.fromkeys(
            ("0", "3", "8", "-2", "2.0", "True"),
            "where the world has 4 ranks: [1, 2, 4] are allowed",
        ),
        "local": "where a machine (LOCAL_WORLD_SIZE) has 2 ranks: [1, 2] are allowed",
        "timeout": "ISLAND_TIMEOUT='soon' must be a number of seconds",
        "twice": "nodes of 2 ranks are in place",
        "mpu": "deepspeed.initialize(mpu=...) after shard_within_node, which supplies the node",
        "mesh": "not confined to the node",
        "config": "not confined to the node",
        "batch": "train_batch_size=13 counts all nodes, and does not divide over 2",
        "sizes": "Check batch related parameters",
        "init group": "zero.Init(data_parallel_group=...) after shard_within_node",
        "init mpu": "zero.Init(mpu=...) after shard_within_node",
        "args": "DeepSpeed requires --deepspeed_config",
    }
    for texts in world(refused):
        assert texts.keys() == wanted.keys()
        for key, words in wanted.items():
            assert words in texts[key], (key, texts[key])


# ---- the proof can fail ------------------------------------------------------------------------


def broken(me, case: str) -> dict[str, str]:
    """An engine whose groups are bent by hand, one after the other; and DeepSpeed that ignores the
    mpu.
    """
    stage, bf16, more = CASES[case]
    config = zero.settings(stage, bf16=bf16, **more)
    shard_within_node(NODE)
    mpu = installed()
    made = zero.engine(config, zero.sgd)
    z = made.optimizer
    assert_confined(made, mpu)
    texts = {}
    bend = {
        "seq": (made, "seq_data_parallel_group", dist.group.WORLD),
        "dp": (z, "dp_process_group", dist.group.WORLD),
    }
    bend["mpu"] = (made, "mpu", OtherMPU())
    bend["gone"] = (z, "dp_process_group", None)
    if stage == "zero3":
        weight = made.module.layers[1].weight
        bend["parameter"] = (weight, "ds_process_group", mpu.cross)
        bend["sub-group"] = (z, "sub_group_process_groups", [dist.group.WORLD])
    else:
        bend["real"] = (z, "real_dp_process_group", [mpu.cross])
    if case != "bf16-optimizer":
        bend["model"] = (z, "model_parallel_group", mpu.cross)
    for key, (owner, attribute, value) in bend.items():
        good = getattr(owner, attribute)
        setattr(owner, attribute, value)
        texts[key] = error_of(RuntimeError, assert_confined, made, mpu)
        setattr(owner, attribute, good)
    assert_confined(made, mpu)
    groups._get_sequence_data_parallel_group = lambda: dist.group.WORLD
    texts["door"] = error_of(RuntimeError, zero.engine, config, zero.sgd)
    return texts


def late(me) -> str:
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)
    config = zero.settings("zero3")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = zero.Model()
    shard_within_node(NODE)
    return error_of(RuntimeError, zero.engine, config, zero.sgd, model)


def test_zero_mesh_model_cut_over_world_refused(world) -> None:
    """A model that was cut over the whole world before is refused."""
    for text in world(late):
        assert "of ranks [0, 1, 2, 3]" in text
        assert "Call shard_within_node before the model is made" in text


@pytest.mark.parametrize("case", ["zero1-fp32", "zero2-bf16", "zero3-fp32", "bf16-optimizer"])
def test_zero_mesh_unconfined_engine_refused(world, case: str) -> None:
    """An engine whose groups reach beyond the node is refused."""
    for rank, texts in enumerate(world(broken, case)):
        assert {"seq", "dp", "mpu", "gone", "door"} < texts.keys()
        line = [rank % 2, rank % 2 + 2]
        wanted = {
            "seq": "the group that reduces gradients of ranks [0, 1, 2, 3], not",
            "dp": "dp_process_group of ranks [0, 1, 2, 3], not",
            "mpu": "the engine's mpu, OtherMPU, reaches further",
            "gone": "dp_process_group of ranks [0, 1, 2, 3], not",
            "real": f"real_dp_process_group[0] of ranks {line}, not",
            "parameter": f"the partition of layers.1.weight of ranks {line}, not",
            "sub-group": "sub_group_process_groups[0] of ranks [0, 1, 2, 3]",
            "model": f"model_parallel_group of ranks {line}, not [{rank}]",
            "door": "of ranks [0, 1, 2, 3]",
        }
        for key, text in texts.items():
            assert wanted[key] in text, (key, text)


# ---- with the exchange, and under the Trainer --------------------------------------------------


def exchanged(me, case: str) -> dict[str, Any]:
    import deepspeed_ext

    stage, bf16, more = CASES[case]
    shard_within_node(NODE)
    made = zero.engine(zero.settings(stage, bf16=bf16, **more), zero.sgd)
    exchange = deepspeed_ext.attach(made, "demo")
    with Recorder() as seen:
        zero.train(made, range(4), me.rank)
    sent = exchange.metrics()["bytes_sent"]
    weights = zero.whole(made)
    exchange.finish()
    return {"crossing": seen.crossing(NODE), "sent": sent, "weights": weights}


@pytest.mark.parametrize("case", CASES)
def test_zero_mesh_exchange_replicas_equal(world, case: str) -> None:
    """No collective of ZeRO crosses nodes, and replicas stay equal."""
    out = world(exchanged, case)
    for rank, mine in enumerate(out):
        assert mine["crossing"] == [] and mine["sent"] > 0, rank  # payloads have their connections
        for name, value in out[0]["weights"].items():
            assert torch.equal(mine["weights"][name], value), name


def trainer(me, folder: str, stage: str) -> dict[str, Any]:
    import os

    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    auto = {
        name: "auto"
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
        )
    }
    config = {
        **auto,
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": zero.BUCKETS | zero.STAGES[stage],
    }
    args = TrainingArguments(
        output_dir=str(me.folder / "out"),
        use_cpu=True,
        bf16=True,
        deepspeed=config,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=100,
        save_strategy="no",
        report_to=[],
        average_tokens_across_devices=False,
        disable_tqdm=True,
    )
    shard_within_node(NODE)
    model = LlamaForCausalLM.from_pretrained(folder)
    rows = [
        {"input_ids": torch.full((6,), i % 37), "labels": torch.full((6,), i % 37)}
        for i in range(64)
    ]
    made = Trainer(model, args, train_dataset=rows)
    with Recorder() as seen:
        made.train()
    engine = made.model_wrapped
    return {
        "mpu": engine.mpu is installed(),
        "batch": engine.train_batch_size(),
        "steps": (engine.global_steps, made.accelerator.num_processes),
        "topology": topology_of(engine.mpu).name,
        "crossing": seen.crossing(NODE),
        "inside": sum(e.size for e in seen.events if e not in seen.crossing(NODE)),
    }


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_zero_mesh_trainer_confined(world, tmp_path: Path, stage: str) -> None:
    """One line confines the Trainer to the node."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaConfig(
        vocab_size=37,
        hidden_size=20,
        intermediate_size=33,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    LlamaForCausalLM(small).save_pretrained(tmp_path / "model")
    for rank, mine in enumerate(world(trainer, str(tmp_path / "model"), stage)):
        assert mine["mpu"] and mine["batch"] == 2 * 2 * NODE and mine["steps"] == (4, 4)
        assert mine["topology"] == f"island{rank // NODE}"
        assert sum(e.size for e in mine["crossing"]) < 1000 < mine["inside"], mine["crossing"]


@in_ranks(1, 4)
def test_zero_mesh_unlike_sizes_refused(me):
    """Unlike sizes of nodes are an error on all ranks. Where the size comes from the GPUs of unlike
    nodes, say: without it groups would wait for each other.
    """
    with pytest.raises(
        ValueError, match="different sizes: 2 on ranks 0-2; 1 on rank 3. Give one number"
    ):
        shard_within_node(1 if me.rank == 3 else 2)
