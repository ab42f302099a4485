"""One world of two nodes x two ranks: ZeRO shards and reduces inside a node, and whatever would
reach further is seen or refused.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3
from deepspeed.utils import groups
from torch import nn

import deepspeed_ext
from deepspeed_ext import node_mesh
from deepspeed_ext.confinement import assert_confined, of_node
from deepspeed_ext.node_mesh import NodeMPU, installed, shard_within_node, topology_of
from fsdp_demo.rendezvous.island import IslandGroup
from fsdp_demo.rendezvous.mesh import meeting_place
from fsdp_demo.rendezvous.position import ShardPosition

from ..support import zero
from ..support.collectives import Event, Recorder
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
    from transformers import LlamaForCausalLM, LlamaForSequenceClassification  # noqa: F401
    from transformers.integrations import HfDeepSpeedConfig  # noqa: F401


def node_of(me: Any) -> tuple[int, ...]:
    """The ranks of this rank's node."""
    first = me.rank // NODE * NODE
    return tuple(range(first, first + NODE))


def error_of(kind: type[BaseException], call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# ---- training ----------------------------------------------------------------------------------


def trained(me, case: str) -> tuple[Any, list[Event], list[Event]]:
    """An engine after four steps; its collectives between nodes, and those inside."""
    stage, bf16, more = CASES[case]
    made = zero.engine(zero.settings(stage, bf16=bf16, accumulate=2, **more), fast_sgd)
    with Recorder() as seen:
        zero.train(made, range(4), me.rank, accumulate=2)
    crossing = seen.crossing(NODE)
    return made, crossing, [e for e in seen.events if len(e.ranks) > 1 and e not in crossing]


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
@in_ranks(1, 4)
def test_zero_mesh_collectives_inside_node(me, case: str) -> None:
    """The collectives of training stay inside the node, and gradients are its mean."""
    shard_within_node(NODE)
    made, crossing, inside = trained(me, case)
    kinds = {"zero3": "DeepSpeedZeroOptimizer_Stage3", "bf16-": "BF16_Optimizer"}
    assert type(made.optimizer).__name__ == kinds.get(case[:5], "DeepSpeedZeroOptimizer")
    assert crossing == [] and {e.ranks for e in inside} == {node_of(me)}
    # gradients and parameters, bf16
    assert sum(e.size for e in inside) > 2 * 4 * NUMEL * 2
    weights, limit = zero.whole(made), 0.02 if CASES[case][1] else 2e-6
    for name, value in averaged(node_of(me)).items():
        torch.testing.assert_close(weights[name], value, rtol=limit, atol=limit)
    mine = torch.cat([t.flatten() for t in weights.values()])
    every = [torch.empty_like(mine) for _ in range(4)]
    dist.all_gather(every, mine)
    # replicas go their own ways, as a whole
    assert torch.equal(every[0], every[1]) and not torch.equal(every[0], every[2])
    assert torch.equal(every[2], every[3])


@pytest.mark.parametrize("case", ["zero1-fp32", "zero2-bf16", "zero3-fp32", "bf16-optimizer"])
@in_ranks(1, 4)
def test_zero_mesh_recorder_sees_crossing(me, case: str) -> None:
    """Without `shard_within_node` the recorder sees ZeRO reduce between the nodes."""
    _, crossing, inside = trained(me, case)
    assert {e.ranks for e in crossing} == {(0, 1, 2, 3)} and inside == []
    assert sum(e.size for e in crossing) > 2 * 4 * NUMEL * 2


@in_ranks(1, 4, timeout=40)
def test_zero_mesh_fetch_order(me) -> None:
    """Nodes may fetch parameters in different orders, but not the ranks of one node."""
    shard_within_node(NODE)
    made = zero.engine(zero.settings("zero3"), zero.sgd)
    for step in range(5):
        rows, targets = zero.batch(step, me.rank)
        out = made(rows)
        # node 1 alone uses a module once more, so that it alone records its fetch order anew
        if step == 2 and me.rank >= NODE:
            out = out + made.module.embed(rows).sum() * 0
        made.backward(nn.functional.cross_entropy(out, targets))
        made.step()
    assert made.global_steps == 5
    same = stage3.assert_ints_same_as_other_ranks
    same([me.rank // NODE, 5])  # equal in the node, different between nodes
    same([])
    if me.rank >= NODE:
        text = error_of(RuntimeError, same, [1, 2] if me.rank == 3 else [1])
        assert "the ranks [2, 3] of one node disagree" in text
        assert "1 entries, CRC-32" in text and "2 entries, CRC-32" in text


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
        assert tuple(dist.get_process_group_ranks(p.ds_process_group)) == node_of(me)
        assert p.ds_tensor.numel() == -(-p.ds_numel // NODE)
    with zero.gathered(model):
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


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@in_ranks(1, 4)
def test_zero_mesh_from_pretrained(me, bf16: bool) -> torch.Tensor:
    """`from_pretrained` loads every replica and cuts parameters inside the node."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
    from transformers.integrations import HfDeepSpeedConfig

    torch.manual_seed(7)
    sizes = {"hidden_size": 20, "intermediate_size": 33, "num_attention_heads": 2}
    whole = LlamaForCausalLM(LlamaConfig(vocab_size=37, num_hidden_layers=2, **sizes))
    if me.rank == 0:
        whole.save_pretrained(me.folder / "model")
    dist.barrier()
    config = zero.settings("zero3", bf16=bf16, train_batch_size=16)
    shard_within_node(NODE)
    keep = HfDeepSpeedConfig(config)  # as TrainingArguments do
    torch.manual_seed(me.rank)
    more = {"num_labels": 3, "pad_token_id": 0}
    model = LlamaForSequenceClassification.from_pretrained(me.folder / "model", **more)
    del keep
    groups = {tuple(dist.get_process_group_ranks(p.ds_process_group)) for p in model.parameters()}
    assert groups == {node_of(me)}
    with zero.gathered(model):
        weights = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    for name, value in whole.named_parameters():
        if not name.startswith("lm_head"):
            assert torch.equal(weights[name], value.bfloat16().float() if bf16 else value), name
    made = zero.engine(config, fast_sgd, model)
    with Recorder() as seen:
        for step in range(3):
            rows, _ = zero.batch(step, me.rank)
            made.backward(made(input_ids=rows, labels=torch.zeros(4, dtype=torch.long)).loss)
            made.step()
    assert seen.crossing(NODE) == []
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        if me.rank == 0:  # an engine's parameters are its replica's own
            model.score.weight.data.fill_(3.0)
    with zero.gathered(model):
        assert (float(model.score.weight.flatten()[0]) == 3.0) == (me.rank < NODE)
    assert weights["score.weight"].std() > 0
    return weights["score.weight"]  # in no file: made on rank 0


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


@in_ranks(1, 4)
def test_zero_mesh_batches_of_replicas(me) -> None:
    """Batch sizes are translated, and replicas draw different samples."""
    shard_within_node(NODE)
    comm = zero.settings("zero1", train_batch_size=16)
    file = me.folder / "zero.json"
    if me.rank == 0:
        file.write_text(json.dumps(comm))
    dist.barrier()
    model = zero.Model()
    command = argparse.Namespace(deepspeed_config=str(file), local_rank=me.rank)

    def started(**given: Any) -> Any:
        given = {"model": model, "optimizer": zero.sgd(model.parameters()), **given}
        return deepspeed.initialize(**given)

    made, _, loader, _ = started(config=comm, training_data=list(range(32)), mpu=installed())
    engines = [made, zero.engine(str(file), zero.sgd)]
    engines += [started(args=command)[0], started(config_params=comm)[0]]
    assert [e.train_batch_size() for e in engines] == [8] * 4
    assert comm["train_batch_size"] == 16 and command.deepspeed_config == str(file)
    evaluation = made.deepspeed_io(list(range(8)), route="eval", num_local_io_workers=0)
    assert [int(i) for i in evaluation.data_sampler] == [me.rank, me.rank + 4]
    assert loader is made.training_dataloader
    drawn: list[Any] = [None] * 4
    dist.all_gather_object(drawn, [int(i) for i in loader.data_sampler])
    assert sorted(i for mine in drawn for i in mine) == list(range(32))


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


@in_ranks(1, 4)
def test_zero_mesh_bad_input_refused(me) -> None:
    """Bad input is refused with what is allowed."""
    for size in (0, 3, 8, -2, 2.0, True):
        text = error_of(ValueError, shard_within_node, size)
        assert "where the world has 4 ranks: [1, 2, 4] are allowed" in text, size
    for name, value, size, said in (
        ("LOCAL_WORLD_SIZE", "2", 4, "machine (LOCAL_WORLD_SIZE) has 2 ranks: [1, 2] are allowed"),
        ("ISLAND_TIMEOUT", "soon", 2, "ISLAND_TIMEOUT='soon' must be a number of seconds"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            assert said in error_of(ValueError, shard_within_node, size)
    shard_within_node(2)
    model, config, start = zero.Model(), zero.settings("zero1"), deepspeed.initialize
    sequence = {"sequence_parallel_size": 1, "data_parallel_size": 4}
    mpu = {"mpu": OtherMPU()}

    def init(**given: Any) -> None:
        deepspeed.zero.Init(**given)

    for said, kind, call, given in (
        ("nodes of 2 ranks are in place", ValueError, lambda: shard_within_node(1), None),
        ("initialize(mpu=...) after shard_within_node, which supplies the node", ValueError,
            start, {"config": config, **mpu}),
        ("not confined to the node", RuntimeError, start,
            {"config": config, "mesh_param": (2, 2)}),
        ("not confined to the node", RuntimeError, start, {"config": config | sequence}),
        ("train_batch_size=13 counts all nodes, and does not divide over 2", ValueError, start,
            {"config": config | {"train_batch_size": 13}}),
        ("Check batch related parameters", AssertionError, start,
            {"config": config | {"train_batch_size": 12}}),
        # DeepSpeed's own: no configuration
        ("DeepSpeed requires --deepspeed_config", AssertionError, start, {}),
        ("zero.Init(data_parallel_group=...) after shard_within_node", ValueError, init,
            {"data_parallel_group": dist.group.WORLD}),
        ("zero.Init(mpu=...) after shard_within_node", ValueError, init, mpu),
    ):  # fmt: skip
        if call is start:
            given = {"model": model, "optimizer": zero.sgd(model.parameters()), **given}
        text = error_of(kind, call, **(given or {}))
        assert said in text, (said, text)


# ---- the proof can fail ------------------------------------------------------------------------


@in_ranks(1, 4)
def test_zero_mesh_model_cut_over_world_refused(me) -> None:
    """A model that was cut over the whole world before is refused."""
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_init_required=False)
    config = zero.settings("zero3")
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = zero.Model()
    shard_within_node(NODE)
    text = error_of(RuntimeError, zero.engine, config, zero.sgd, model)
    assert "of ranks [0, 1, 2, 3]" in text
    assert "Call shard_within_node before the model is made" in text


@pytest.mark.parametrize("case", ["zero1-fp32", "zero2-bf16", "zero3-fp32", "bf16-optimizer"])
@in_ranks(1, 4)
def test_zero_mesh_unconfined_engine_refused(me, case: str) -> None:
    """An engine whose groups reach beyond the node is refused: they are bent by hand, one after the
    other; and DeepSpeed that ignores the mpu.
    """
    stage, bf16, more = CASES[case]
    config = zero.settings(stage, bf16=bf16, **more)
    shard_within_node(NODE)
    mpu = installed()
    made = zero.engine(config, zero.sgd)
    z, world, line = made.optimizer, dist.group.WORLD, [me.rank % 2, me.rank % 2 + 2]
    everybody = "of ranks [0, 1, 2, 3]"
    bent = [
        (f"the group that reduces gradients {everybody}, not", made, "seq_data_parallel_group",
            world),
        (f"dp_process_group {everybody}, not", z, "dp_process_group", world),
        (f"dp_process_group {everybody}, not", z, "dp_process_group", None),
        ("the engine's mpu, OtherMPU, reaches further", made, "mpu", OtherMPU()),
    ]  # fmt: skip
    if stage == "zero3":
        weight = made.module.layers[1].weight
        said = f"the partition of layers.1.weight of ranks {line}, not"
        bent.append((said, weight, "ds_process_group", mpu.cross))
        said = f"sub_group_process_groups[0] {everybody}"
        bent.append((said, z, "sub_group_process_groups", [world]))
    else:
        said = f"real_dp_process_group[0] of ranks {line}, not"
        bent.append((said, z, "real_dp_process_group", [mpu.cross]))
    if case != "bf16-optimizer":
        said = f"model_parallel_group of ranks {line}, not [{me.rank}]"
        bent.append((said, z, "model_parallel_group", mpu.cross))
    assert_confined(made, mpu)
    for said, owner, attribute, value in bent:
        good = getattr(owner, attribute)
        setattr(owner, attribute, value)
        assert said in error_of(RuntimeError, assert_confined, made, mpu)
        setattr(owner, attribute, good)
    assert_confined(made, mpu)
    groups._get_sequence_data_parallel_group = lambda: world
    assert everybody in error_of(RuntimeError, zero.engine, config, zero.sgd)


# ---- with the exchange -------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@in_ranks(1, 4)
def test_zero_mesh_exchange_replicas_equal(me, case: str) -> dict[str, torch.Tensor]:
    """No collective of ZeRO crosses nodes, and replicas stay equal."""
    stage, bf16, more = CASES[case]
    shard_within_node(NODE)
    made = zero.engine(zero.settings(stage, bf16=bf16, **more), zero.sgd)
    exchange = deepspeed_ext.attach(made, "demo")
    with Recorder() as seen:
        zero.train(made, range(4), me.rank)
    weights = zero.whole(made)
    # payloads have their connections
    assert seen.crossing(NODE) == [] and exchange.metrics()["bytes_sent"] > 0
    exchange.finish()
    return weights


@in_ranks(1, 4)
def test_zero_mesh_unlike_sizes_refused(me):
    """Unlike sizes of nodes are an error on all ranks. Where the size comes from the GPUs of unlike
    nodes, say: without it groups would wait for each other.
    """
    with pytest.raises(
        ValueError, match="different sizes: 2 on ranks 0-2; 1 on rank 3. Give one number"
    ):
        shard_within_node(1 if me.rank == 3 else 2)
