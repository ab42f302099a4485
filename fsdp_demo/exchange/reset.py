"""Parameters that the script has written in mid-run become the new state of all islands
(`Exchange.reset`): their mean is the new anchor, and what channels keep of them begins anew.

An island that is joining starts over from a new snapshot (`elastic/newcomer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..elastic.agreement import gather_json
from ..elastic.peer_group import PeerGroup
from ..errors import first_few, see
from ..hosts.base import TrainingHost, plain_name
from ..peers.header import RESET
from . import finish
from .runtime import StepRuntime


def reset(runtime: StepRuntime, parameters: Iterable[Tensor | str]) -> None:
    """`Exchange.reset`. All ranks of all islands call it together."""
    indices, wrong = _found(runtime.host, parameters)
    _agree(runtime, sorted({runtime.host.params[i].name for i in indices}), wrong)
    if runtime.donor_feed is not None:
        runtime.donor_feed.tick(None)
    only = runtime.parameters.narrowed(indices)
    written = only.pack("parameter")
    finish.flush(runtime)  # which writes these tensors, too
    only.write(written, only.tensors("parameter"))
    only.write(finish.mean_parameters(runtime, only), only.tensors("parameter"))
    runtime.host.commit()
    for c in runtime.channels:
        c.restart(indices)
    runtime.queue.history.hear_reset(runtime.step)


def _found(host: TrainingHost, parameters: Iterable[Tensor | str]) -> tuple[set[int], str]:
    """The indices of these parameters in the host's `params`, and what is wrong with the rest."""
    given = [parameters] if isinstance(parameters, (Tensor, str)) else list(parameters)
    places: dict[int | str, set[int]] = {}
    for i, s in enumerate(host.params):
        for key in () if s.frozen else (s.name, id(host.parameter(i))):
            places.setdefault(key, set()).add(i)
    found = [places.get(plain_name(p) if isinstance(p, str) else id(p), set()) for p in given]
    odd = [p for p, indices in zip(given, found, strict=True) if not indices]
    if given and not odd:
        return set().union(*found), ""
    words = {id(host.parameter(i)): s.name for i, s in enumerate(host.params)} | {
        id(p): repr(p) for p in odd if isinstance(p, str)
    }
    what = [words.get(id(p), f"a {type(p).__name__} {[*getattr(p, 'shape', ())]}") for p in odd]
    return set(), (
        f"reset() got {first_few(what) or 'no parameter'}: it takes whole parameters that the "
        "attached optimizers train, as they are in the sharded model, or their names, such as "
        f"{host.params[0].name!r}; no frozen ones, no parts"
    )


def _agree(runtime: StepRuntime, names: list[str], wrong: str) -> None:
    """Raise ValueError on all ranks if steps or names differ, or something is `wrong` on one."""
    mine, name = [runtime.step, names, wrong], runtime.topology.name

    def ask(peers: PeerGroup) -> list[Any]:
        everyone = gather_json(peers, mine, RESET, runtime.step)
        return [[peers.label(j), *theirs] for j, theirs in enumerate(everyone)]

    heard = [[name, *mine], *(runtime.queue.ask(ask) or [])]
    everyone = [told for rank in runtime.island.everyone(heard) for told in rank]
    for who, *_, wrong in everyone:
        if wrong:
            raise ValueError(f"{who}: {wrong}{see('reset')}")
    shared = set(names).intersection(*(theirs for _, _, theirs, _ in everyone))
    unlike = {
        f"step {step}, {first_few([n for n in theirs if n not in shared]) or 'no others'}": who
        for who, step, theirs, _ in everyone
    }
    if len(unlike) > 1:
        raise ValueError(
            "all islands call reset() at the same step, with the same parameters. Here come "
            + "; ".join(f"from {who}: {what}" for what, who in unlike.items())
            + see("reset")
        )
