"""Long runs of the study: what they save, and that they go on from it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from study import run as study_run
from study import states as study_states
from study.cells import Cell, Run

from . import test_study
from .test_study import CELLS, SHORT

AFTER = 3
"""The step after which the runs here are interrupted; of five."""

LATE = Cell("late", "diloco", {"period": 3, "schedule.delay": 1})
MUON = Cell("muon", "muloco", {"period": 2}, lr=0.02)


def interrupted(folder: Path, cell: Cell, counted: list) -> list:
    """[a run in one go, the same run from what it had saved after `AFTER` steps]."""
    study_run.load_texts = test_study.texts
    study_states.LONG, study_states.PARTS = 0.0, SHORT.steps
    study_states.States.forget_before = lambda self, step: None
    step = study_run.Loop.step
    study_run.Loop.step = lambda loop: counted.append(loop.i) or step(loop)
    run, folder = Run(cell, SHORT, 3), folder / cell.name
    found = [study_run.train_run(run, compiled=False, folder=folder)]
    later = [p for p in folder.iterdir() if f"step{AFTER + 1}-" in p.name]
    assert len(later) == cell.replicas and len(list(folder.iterdir())) == 4 * cell.replicas
    for path in later[1:]:  # one replica had saved the next step: not all, so it does not count
        path.unlink()
    counted.clear()
    return [*found, study_run.train_run(run, compiled=False, folder=folder)]


@pytest.mark.parametrize("cell", [*CELLS, LATE, MUON], ids=lambda c: c.name)
def test_study_states_interrupted_run_ends_as_without(tmp_path, run_ranks, cell):
    """A run that was interrupted between two rounds ends as without, with feedback, momentum, Muon,
    and a payload under way.
    """

    def both():
        counted = []
        return [*interrupted(tmp_path, cell, counted), counted]

    ((straight, resumed, counted),) = run_ranks(both, 1, 1)
    assert sorted(counted) == sorted([*range(cell.replicas)] * (SHORT.steps - AFTER))
    seconds = [run["curve"].pop("seconds") for run in (straight, resumed)]
    assert seconds[0][:AFTER] == seconds[1][:AFTER] and resumed["seconds"] > seconds[0][AFTER - 1]
    for name in ("curve", "loss", "rounds"):  # products differ in last bits from run to run
        for part, values in straight[name].items():
            np.testing.assert_allclose(resumed[name][part], values, 1e-5, err_msg=name)
    for name in ("bytes_sent", "bytes_received", "exchanges", "equal_at_end"):
        assert resumed[name] == straight[name], name


def test_study_states_of_a_run(tmp_path):
    """Long runs save their states at fixed parts, and short ones do not."""
    run = Run(CELLS[0], SHORT, 0)
    assert not study_states.States(tmp_path, run).due(3)  # a short run is not saved
    long = dataclasses.replace(run, setting=dataclasses.replace(SHORT, steps=10**10))
    states = study_states.States(tmp_path / "new", long)
    part = 10**10 // 16
    assert [states.due(step) for step in (1, part - 1, part, part + 1)] == [
        False,
        False,
        True,
        False,
    ]
    assert not states.due(10**10) and not study_states.States(None, long).due(part)
    assert states.newest() == 0
    for step in (part, 2 * part):
        for replica in range(4):
            assert states.newest() == step - part
            states.write(step, replica, {"seen": step})
    assert states.newest() == 2 * part and states.read(part, 1) == {"seen": part}
    (tmp_path / "new" / f"step{3 * part}-replica0.part").write_text("cut off")
    states.forget_before(2 * part)
    assert states.newest() == 2 * part and len(list((tmp_path / "new").iterdir())) == 5
    for changes in ({"attach_at": 2}, {"owners": (90, 0.0)}, {"gain": 1.0}):
        trial = dataclasses.replace(long, cell=dataclasses.replace(CELLS[0], **changes))
        assert not study_states.States(tmp_path, trial).due(part), changes
