"""What reaches a Trainer between `attach` and its first step: SIGTERM, a lost peer, callbacks whose
states are restored.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import accelerate
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import TrainerControl

import fsdp_demo
from fsdp_demo.integrations.trainer import (
    beginning,
    session,
    state,
)

from ..support import trainer_script as script
from ..support.inside import in_ranks
from ..support.trainer_script import one_line


@pytest.mark.parametrize(
    "version, kind, said",
    [("1.11.0", "SHARDED_STATE_DICT", 1), ("1.11.0", None, 0), ("1.13.0", "SHARDED_STATE_DICT", 0)],
)
def test_trainer_warns_of_lost_moments(monkeypatch, caplog, version, kind, said):
    """A resume beside an Accelerate that loads no moments under FSDP2 says that they are lost."""
    monkeypatch.setattr(accelerate, "__version__", version)
    plugin = kind and SimpleNamespace(state_dict_type=kind)
    inner = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    trainer = SimpleNamespace(accelerator=inner, args=SimpleNamespace(process_index=0))
    with caplog.at_level(logging.WARNING, "fsdp_demo"):
        beginning.warn_of_lost_moments(trainer, fsdp_demo.Topology("islands"))
    assert caplog.text.count("moments begin at zero") == said


def told(folder):
    """What the launcher was told, by rank."""
    return {p.name: p.read_text() for p in Path(folder).glob("*")}


def test_trainer_sigterm_before_first_step(run_ranks, tmp_path):
    """SIGTERM before the first step ends with status 75 at once: there is nothing to save."""

    def work(rank):
        class Terminated(session.Evaluations):
            def __init__(self, *args):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)  # a compilation

        session.Evaluations = Terminated
        script.alone(rank).train()

    env = {"ISLAND_STATUS": str(tmp_path / "status")}
    (out,) = run_ranks(work, islands=1, procs=1, env=env, check=False, timeout=50)
    assert out.status == 75 and told(tmp_path / "status") == {"rank0": "75"}
    assert "before its first step, so there is nothing to save" in out.log


@pytest.mark.parametrize("full", [False, True])
@in_ranks(1, 1, env=lambda rank: {"ISLAND_STATUS": str(rank.folder / "status")})
def test_trainer_peer_lost_and_disk_full(me, full):
    """A run with a lost peer and a full disk does not ask to be started again. It would go on from
    an older checkpoint: uncaught, the error ends Python with 1, not 75.
    """

    def lost(*_, **__):
        raise fsdp_demo.PeerLost("island 1")

    def no_room(*args):
        raise OSError(28, "No space left on device")

    if full:
        state.save_state = no_room
    trained = script.alone(me, [script.At("on_step_begin", lost, 1)])
    with pytest.raises(fsdp_demo.PeerLost) as ended:
        trained.train()
    assert ended.value.unsaved == full
    assert told(os.environ["ISLAND_STATUS"]) == ({} if full else {"rank0": "75"})


@pytest.mark.parametrize("behind", [False, True])
@in_ranks(1, 1)
def test_trainer_newcomer_restores_callbacks(me, behind):
    """A newcomer restores the states of callbacks, and none is left out. transformers takes
    restored callbacks out of the list and puts them in anew, while `on_train_begin` walks it.
    """
    begun, steps = [], []

    class Seen(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_train_begin(self, args, state, control, **kwargs):
            begun.append(self.name)

        def on_step_end(self, args, state, control, **kwargs):
            steps.append(self.name)

    states = {"EarlyStoppingCallback": EarlyStoppingCallback(3).state()}
    states["TrainerControl"] = TrainerControl().state()
    attach = beginning.attach

    def joined(*args, **kwargs):
        exchange = attach(*args, **kwargs)
        exchange.newcomer, exchange.told = True, {"state": {"stateful_callbacks": states}}
        return exchange

    beginning.attach = joined
    line = one_line("demo")
    callbacks = [EarlyStoppingCallback(3), *line.pop("callbacks")]
    if behind:
        callbacks.reverse()
    settings = {"max_steps": 1, "save_strategy": "no", "metric_for_best_model": "loss"}
    settings |= {"greater_is_better": False, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"restore_callback_states_from_checkpoint": True}
    settings |= {"callbacks": [*callbacks, Seen("a"), Seen("b")]}
    script.trained(me.folder / "out", line, **settings)
    assert (begun, steps) == (["a", "b"], ["a", "b"])
