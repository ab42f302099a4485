"""`attach`: from what users have (an optimizer, a preset's name) to an `Exchange`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from .checkpoint.exchange_state import SavedExchange
from .config.auto import AutoChoice, undecided
from .config.load import changed, load_config
from .config.schema import ExchangeConfig
from .errors import see
from .exchange import summary
from .exchange.exchange import Exchange
from .exchange.startup import Start
from .exchange.summary import total_steps
from .hosts import base
from .hosts.base import TrainingHost
from .hosts.torch_params import TorchHost, unwrap_model
from .peers.votes import Ranks
from .rendezvous.topology import Topology

log = logging.getLogger("fsdp_demo")

# An exchange is held by the hooks on its optimizers alone, so it goes with them.
_attached: WeakKeyDictionary[torch.optim.Optimizer, ReferenceType[Exchange]] = WeakKeyDictionary()


def attach(
    optimizer: Any,
    config: ExchangeConfig | str,
    *,
    model: torch.nn.Module | None = None,
    topology: Topology | None = None,
    must_match: dict[str, Any] | None = None,
    step: int | None = None,
    state: dict[str, Any] | SavedExchange | None = None,
    batch: tuple[int, int] | None = None,
    catch_up: bool = True,
    fresh: bool = False,
    **changes: Any,
) -> Exchange:
    """Join the replicas of a model: from now on every `optimizer.step()` takes part in the
    exchange.

    Call it after the model is sharded and the optimizer built (after `accelerator.prepare`), and
    after weights are loaded (`accelerator.load_state`), on all ranks of all islands: parameters
    that were changed since are refused at the first step.

    Args:
        optimizer: a torch optimizer, an Accelerate wrapper of one, or a list of them that step in
            turns, behind all backward passes; or an engine of a package that offers an `attach` of
            its own (`hosts/base.py`; deepspeed_ext: what `deepspeed.initialize` returned).
        config: a preset name, the path of a yaml file, an `ExchangeConfig`, or "auto", which
            measures the link and the first steps and then chooses (`automatic`).
        model: gives parameters their names, and its frozen parameters and buffers are made equal on
            all replicas.
        topology: default `Topology.from_env()`.
        must_match: further facts of the run (steps, batch, schedule; JSON values) that all replicas
            must share.
        step: the job's step to start from (resume); default 0, of an engine its own count.
        state: `Exchange.state_dict()` of this rank to resume from, or
            `checkpoint.load_exchange(...)`, which may have been saved by another number of islands
            or shards. Replicas without one take over from the one that is furthest.
        batch: rows of a micro-batch per rank and micro-batches per step: the log says the effective
            batch then, and warns where islands train unlike ones.
        catch_up: False leaves it to the caller to call `Exchange.catch_up`, which makes up for an
            exchange that a loss had cut off.
        fresh: at a step above 0 there is no state because none is wanted: no warning says what is
            lost without it.
        changes: changes of the preset, as in `preset(name, **changes)`.

    Raises:
        ValueError: a wrong configuration, a preset not defined for this optimizer, parameters or an
            optimizer that cannot be exchanged, an optimizer of another model, islands that run
            something else (configuration, parameters, optimizers and their numbers).
        PeerLost: islands that did not come in time.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(4, 4)
        >>> exchange = fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "diloco", model=model)
        >>> exchange.config.equal_after_exchange
        True
    """  # noqa: E501
    given: dict[str, Any] = dict(topology=topology, must_match=must_match, step=step, state=state)
    given |= dict(model=model, batch=batch, catch_up=catch_up, fresh=fresh)
    if (engine_module := base.find_host(optimizer)) is not None:
        attached: Exchange = engine_module.attach(optimizer, config, **given, **changes)
        return attached
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = unwrap_model(model)
    given["model"] = inner
    return join(TorchHost(optimizers, inner), settled(config, changes), **given)


def settled(config: ExchangeConfig | str, changes: dict[str, Any]) -> ExchangeConfig:
    """A preset's name or yaml file as a configuration, with the changes made."""
    if isinstance(config, str):
        return load_config(config, changes)
    return changed(config, changes)


def join(
    host: TrainingHost,
    config: ExchangeConfig,
    *,
    model: torch.nn.Module | None,
    topology: Topology | None,
    must_match: dict[str, Any] | None = None,
    step: int | None = None,
    state: dict[str, Any] | SavedExchange | None = None,
    batch: tuple[int, int] | None = None,
    catch_up: bool = True,
    fresh: bool = False,
) -> Exchange:
    """`attach` for the parameters of any engine.

    Raises:
        ValueError: one of its optimizers has an exchange already; a rank of several that does not
            know the others; and as `attach`.
    """
    vacate(host.optimizers)
    facts = {f"must_match.{k}": v for k, v in (must_match or {}).items()}
    topology = topology or Topology.from_env()
    refuse_lone_rank(topology, os.environ)
    summary.speak(topology)
    choice: AutoChoice | None = None
    earlier: ExchangeConfig | None = None
    opened = config  # before it is known what this run began with
    if undecided(config) or config.waits_for_steps:  # else the planner is not imported
        from . import automatic

        # in a mesh nobody looks into a store, else all ranks of torch's group are one island
        island = Ranks.everywhere(host.device)
        earlier, choice = automatic.remembered(topology, state, island)
    if config.waits_for_steps:
        config = config.begun_as(earlier) if earlier else config.fixed(total_steps(facts))
        _say_left_out(opened, config, topology)
    elif earlier is not None:
        config = earlier
    start = Start(step or 0, state, facts, batch or (), catch_up, fresh)
    with ExitStack() as undo:  # an error leaves the optimizers as they were
        exchange = Exchange(host, config, model, topology, start, opened, choice)
        undo.callback(exchange.detach)
        if opened.waits_for_steps and earlier is None:
            automatic.tell(topology, config)
        if choice is not None:
            automatic.watch(exchange, choice)
        elif undecided(config):
            automatic.begin(exchange, model, total_steps(facts))
        undo.pop_all()
    _attached.update(dict.fromkeys(host.optimizers, ref(exchange)))
    return exchange


def _say_left_out(opened: ExchangeConfig, config: ExchangeConfig, topology: Topology) -> None:
    """Log the phases of `opened` that `config` has not, on the first rank."""
    pairs = zip(opened.channels, config.channels, strict=True)
    shares = sorted({p.begin for c, now in pairs for p in c.later if len(now.later) < len(c.later)})
    if shares and topology.rank == 0:
        log.warning(
            "%s: phases that begin at a share of the run (%s) do not begin, since its steps are "
            "not known from its first start, or it had none then: give the steps there, as in "
            'attach(..., must_match={"steps": N}), or let phases begin after a number of steps',
            topology.name,
            ", ".join(f"{share:g}" for share in shares if share < 1),
        )


def refuse_lone_rank(topology: Topology, env: Mapping[str, str]) -> None:
    """A launcher has started several ranks on this island, and they have not met: each would play
    the whole island, and all but one would be refused as a second island of that number. Or they
    have met since `topology` was made, which knows this rank alone.

    Where each process of a launch is an island of its own, its two ranks and two counts are equal.

    Raises:
        ValueError: that is so.
    """
    world, rank = env.get("WORLD_SIZE", ""), env.get("RANK", "")
    if topology.one_world or topology.world > 1 or topology.group is not None:
        return
    if dist.is_initialized():
        count, own = dist.get_world_size(), (topology.islands, topology.island)
        if count > 1 and (count, dist.get_rank()) != own:
            raise ValueError(
                f"torch.distributed has {count} ranks, but the topology knows this one alone: it "
                "was made before init_process_group. Call Topology.from_env() after "
                f"torch.distributed.init_process_group{see('rank-taken')}"
            )
        return
    if not topology.elastic:
        return
    if not world.isdigit() or int(world) < 2:
        return
    if (world, rank) == (str(topology.islands), str(topology.island)):
        return
    raise ValueError(
        f"the launcher started {world} ranks on island {topology.island} (WORLD_SIZE={world}), but "
        "torch.distributed is not initialised: each rank would train as an island of its own. "
        "Before attach call torch.distributed.init_process_group, and shard or wrap the model "
        "(fully_shard, DistributedDataParallel); or start one process per island"
        f"{see('rank-taken')}"
    )


def vacate(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Take away what finished exchanges have left on optimizers (it only says that they are
    finished).

    Raises:
        ValueError: one of them has an exchange that runs.
    """
    for o in optimizers:
        found = _attached.get(o)
        before = None if found is None else found()
        if before is not None and before.running:
            raise ValueError(
                "this optimizer has an exchange already: finish() or detach() that one first, or "
                "attach once"
            )
        if before is not None:
            before.detach()
