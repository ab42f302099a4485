"""DropCompute in the Trainer's accumulation."""

import copy

import pytest
import torch
from transformers import TrainerCallback

import fsdp_demo
from fsdp_demo.exchange import drop
from fsdp_demo.integrations.accelerate import accelerator

from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.refused import refusal

N = 5


class Watch(TrainerCallback):
    """The gradients of the first step, before they are clipped."""

    def __init__(self):
        self.gradients, self.drawn = [], 0

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:
            for p in model.parameters():
                whole = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                self.gradients.append(whole.clone())

    def on_substep_end(self, args, state, control, **kwargs):
        self.drawn += 1


def whole(batch):
    """The tensors of a micro-batch."""
    return {k: torch.tensor(v) for k, v in batch.items() if k != "num_items_in_batch"}


def gradients(everyone, divisor):
    """Those of the micro-batches of all ranks, by the labels of all or of those taken."""
    model = script.model()
    taken = [whole(batch) for mine in everyone for batch in mine]
    items = sum(batch["labels"][:, 1:].ne(-100).sum() for batch in taken)
    if divisor == "published":
        items = torch.tensor(everyone[0][0]["num_items_in_batch"])
    for batch in taken:
        model(**batch, num_items_in_batch=items).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("divisor, fsdp", [("exact", True), ("published", False)])
@in_ranks(2, 2, timeout=120)
def test_trainer_drop_gradient_and_counts(me, divisor, fsdp):
    """Dropped micro-batches are drawn and not computed; the gradient has the divisor that was asked
    for, and tokens are those trained on, as the Trainer counts them, too."""
    now, taken, seen = [0.0], [], Watch()
    drop.clock = lambda: now[0]
    line = script.one_line("diloco", period=2, drop={"limit": 2.5, "divisor": divisor})
    plan = {"gradient_accumulation_steps": N, "max_steps": 2, "max_grad_norm": 0.0}
    plan |= {"include_num_input_tokens_seen": "all"}
    made = script.trainer(
        me.folder / "out",
        line,
        fsdp=fsdp,
        callbacks=[seen],
        eval_strategy="no",
        logging_steps=1,
        rows=160,
        **plan,
    )

    def forward(module, args, kwargs, output):
        now[0] += 1.0 if me.island else 0.1
        taken.append({k: copy.deepcopy(v) for k, v in kwargs.items() if torch.is_tensor(v)})

    made.model.register_forward_hook(forward, with_kwargs=True)
    made.train()
    exchange, per_step = script.exchange_of(made), 4 if me.island else N
    assert len(taken) == 2 * per_step and seen.drawn == 2 * (N - 1)
    assert exchange.drop.dropped == 2 * (N - per_step)
    assert exchange.tokens == sum(batch["input_ids"].numel() for batch in taken)
    flops = sum(made.floating_point_ops(batch) for batch in taken)
    counts = torch.tensor([float(exchange.tokens), float(flops)])
    torch.distributed.all_reduce(counts)
    assert [made.state.num_input_tokens_seen, made.state.total_flos] == counts.tolist()
    first = [{k: v.tolist() for k, v in batch.items()} for batch in taken[:per_step]]
    everyone = [None, None]
    torch.distributed.all_gather_object(everyone, first)
    want = gradients(everyone, divisor)
    for a, b in zip(seen.gradients, want, strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        mean = sum(script.model()(**whole(batch)).loss for mine in everyone for batch in mine)
    assert abs(made.state.log_history[0]["loss"] * 2 * per_step - float(mean)) < 1e-2


def test_trainer_drop_refuses_short_accumulation(tmp_path):
    """Steps of fewer than three micro-batches leave nothing to drop."""
    line = script.one_line("demo", drop={"limit": 1.0})
    refusal(
        lambda: script.trainer(tmp_path, line),
        "gradient_accumulation_steps=1", "set 3 or more",
    )  # fmt: skip


def test_accelerate_drop_inside_accumulate(monkeypatch):
    """A loop of Accelerate asks within `accumulate`: it steps at the last micro-batch."""
    now, taken = [0.0], []
    monkeypatch.setattr(drop, "clock", lambda: now[0])
    acc = accelerator(cpu=True, gradient_accumulation_steps=N)
    model = acc.prepare(torch.nn.Linear(4, 4))
    optimizer = acc.prepare(torch.optim.AdamW(model.parameters()))
    line = {"model": model, "drop": {"limit": 2.5}}
    exchange = fsdp_demo.attach(optimizer, "diloco", **line)
    for i in range(2 * N):
        with acc.accumulate(model):
            if exchange.time_is_up(i % N, N):
                continue
            acc.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            now[0] += 1.0
            taken.append((exchange.step, i % N))
    assert taken == [(0, 0), (0, 1), (0, 2), (1, N - 1), (1, 0), (1, 1), (1, 2), (2, N - 1)]
    exchange.finish()
