"""The numbers of a report: those of the whole job after a resume, operations, bytes, and the
comparison.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import compare
import pytest
import report
import torch

from fsdp_demo.exchange.ledger import LedgerPage, Moved
from fsdp_demo.exchange.readings import Activity

from .test_pretrain import tiny

PARAMETERS = 1000


class Ranks:
    """The accelerator of one rank, which hears the same from all ranks of its island."""

    device, is_main_process = torch.device("cpu"), True

    def __init__(self, procs: int):
        self.num_processes = procs

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return mine.repeat(self.num_processes, 1)


class Exchange:
    """One rank's: 100 B, 1 s and one exchange at each step, where there are other islands."""

    config, drift, newcomer = SimpleNamespace(preset="full", to_yaml=lambda: "{}"), None, False
    activity, chosen_because = Activity(), ""

    def __init__(self, islands: int, procs: int, step: int):
        self.ranks = islands * procs
        self.topology = SimpleNamespace(count=islands, one_world=False, name="island0", island=0)
        self.step, self.taken = step, 0
        self.participants = list(range(islands))

    def metrics(self) -> dict[str, Any]:
        sent = self.taken if self.topology.count > 1 else 0
        waited = {"seconds_waiting": 0.0, "seconds_exchanging": 0.0}
        return {"bytes_sent": 100 * sent, "exchanges": sent, "loss": None, **waited}

    def totals(self) -> dict[str, Any]:
        return {"global_tokens": 10 * self.taken * self.ranks}

    def timeline(self, after: Any = None) -> Sequence[Any]:
        return []

    def kept_energy(self) -> dict[str, float]:
        return {}

    def ledger(self) -> LedgerPage:
        return LedgerPage({}, Moved(), Moved())


def start(
    folder: Path, islands: int, procs: int, steps: Any, before: Any = None, left: Any = ()
) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Steps of a job from `before` on: state, summary and table of rank 0."""
    exchange = Exchange(islands, procs, steps[0])
    how = {"steps": steps[1], "log_every": 10, "parameters": PARAMETERS, "facts": {}}
    made = report.Report(Ranks(procs), exchange, folder, **how)
    if before is not None:
        made.load_state_dict(json.loads(json.dumps(before)))
    if not steps[0]:  # as the recipes do
        made.evaluated(3.0, 0.0)
    for _ in range(*steps):
        made.micro_batch(torch.tensor(2.0))
        exchange.step, exchange.taken = exchange.step + 1, exchange.taken + 1
        made.optimizer_step(0.1)
    exchange.participants = list(left) or exchange.participants
    state = made.state_dict()
    made.evaluated(2.0, 0.0)
    summary = made.finish(True)
    return state, summary, "\n".join("  ".join(row) for row in made._rows(summary))


def test_report_one_island_goes_on_where_two_were(tmp_path):
    """One island goes on where two were: the report has the bytes of the whole job."""
    state, first, _ = start(tmp_path, 2, 2, (0, 50))
    assert first["bytes_full_per_island"] == 2 * PARAMETERS * 50
    _, last, table = start(tmp_path, 1, 2, (50, 60), state)
    # 50 steps of two islands, then 10 that send nothing
    assert last["bytes_sent_per_island"] == 2 * 100 * 50
    assert last["bytes_full_per_island"] == 2 * PARAMETERS * 50
    assert last["ratio"] == first["ratio"] == 10.0 and "10.0 x fewer bytes" in table
    assert last["tokens"] == 10 * (50 * 4 + 10 * 2)
    assert "1 island x 2 ranks, 60 steps" in table and "counted since" not in table
    assert "validation loss  3.000 before, 2.000 after" in table


@pytest.mark.parametrize(("islands", "procs"), [(2, 1), (3, 2), (2, 2)])
def test_report_other_numbers_share_what_was_counted(tmp_path, islands, procs):
    """Other numbers of islands and processes share what was counted."""
    state, _, _ = start(tmp_path, 2, 2, (0, 50))
    _, last, _ = start(tmp_path, islands, procs, (50, 60), state)
    assert last["tokens"] == 10 * (50 * 4 + 10 * islands * procs)
    assert last["bytes_sent_per_island"] == 100 * (2 * 50 + procs * 10)
    here = report.full_bytes(PARAMETERS, 10, islands)
    assert last["bytes_full_per_island"] == 2 * PARAMETERS * 50 + here


def test_report_counters_of_an_earlier_release(tmp_path):
    """Counters of an earlier release count for the same islands."""
    state, _, _ = start(tmp_path, 2, 2, (0, 50))
    old = {k: v for k, v in state.items() if k not in ("bytes_full", "islands", "procs")}
    summaries = [start(tmp_path, 2, 2, (50, 60), one)[1] for one in (old, state)]
    for key in ("tokens", "bytes_sent_per_island", "bytes_full_per_island", "ratio"):
        assert summaries[0][key] == summaries[1][key]
    assert summaries[0]["bytes_full_per_island"] == 2 * PARAMETERS * 60


def test_report_without_counters_says_from_where_it_counts(tmp_path):
    """A report without counters says from which step it counts."""
    _, summary, table = start(tmp_path, 2, 1, (50, 60))
    assert summary["since"] == 50 and "counted since step  50" in table
    assert "validation loss  2.000 after" in table
    assert summary["bytes_full_per_island"] == 2 * PARAMETERS * 10


@pytest.mark.parametrize(("islands", "left", "says", "agree"), [
    (3, (0, 2), "islands  3 began, 2 at the end (0, 2)", "yes, bit for bit, of the 2 at the"),
    (2, (0,), "islands  2 began, 1 at the end (0)", "one island is left"),
    (2, (0, 1, 2), "islands  2 began, 3 at the end (0, 1, 2)", "of the 3 at the end"),
    (2, (0, 1), "", "islands agree  yes, bit for bit"),
])  # fmt: skip
def test_report_table_says_who_took_part_at_the_end(tmp_path, islands, left, says, agree):
    """The table says which islands took part at the end."""
    _, summary, table = start(tmp_path, islands, 1, (0, 10), left=left)
    assert summary["participants"] == list(left) and says in table and agree in table
    assert ("all islands" in table) == (not says)


def test_report_flops_per_token():
    """The operations per token are those of the matrices and of attention."""
    layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384 + 2 * 128  # q and o, k and v, MLP, norms
    head, attention = 258 * 128, 2 * 128
    whole = 6 * (2 * layer + 128 + head) + 12 * attention * 100
    for model in (tiny(), tiny(tie_word_embeddings=True)):
        assert report.flops_per_token(model, 100) == whole


def test_report_peak_is_known_by_name_or_given(monkeypatch):
    """The peak of a GPU is known by its name, or given."""
    gpus = {"H200": 989, "H100 PCIe": 756, "A100-SXM4-80GB": 312, "L40S": 362, "L4": 121}
    for gpu, peak in gpus.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, gpu=gpu: f"NVIDIA {gpu}")
        assert report.peak_flops(torch.device("cuda")) == peak * 1e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another GPU")
    assert report.peak_flops(torch.device("cuda")) is None
    assert report.peak_flops(torch.device("cuda"), 5) == 5e12
    assert report.peak_flops(torch.device("cpu")) is None


def test_report_trackers_name_islands(tmp_path):
    """Each tracker gets a name of the run that holds run and island; TensorBoard gets a folder."""
    told: dict[str, Any] = {}
    ranks = Ranks(1)
    ranks.project_configuration = SimpleNamespace(logging_dir=None)
    ranks.init_trackers = lambda project, **more: told.update(more["init_kwargs"])
    how = {"steps": 1, "log_every": 1, "parameters": PARAMETERS, "facts": {}}
    report.Report(ranks, Exchange(2, 1, 0), tmp_path / "run1", **how).track()
    names = {tracker: given.get("run_name", given.get("name")) for tracker, given in told.items()}
    assert names == dict.fromkeys(("wandb", "trackio", "mlflow"), "run1-island0")
    assert ranks.project_configuration.logging_dir == str(tmp_path / "run1" / "island0")


def test_report_full_bytes_is_a_ring_all_reduce():
    """`full_bytes` counts a ring all-reduce of gradients in bf16."""
    # (R - 1) / R of the buffer twice, 2 bytes each
    assert report.full_bytes(1000, 10, 2) == 2 * 1 * 1000 * 10
    assert report.full_bytes(1000, 10, 4) == 3 * 1000 * 10
    assert report.full_bytes(1000, 10, 1) == 0


def test_compare_has_a_row_per_preset(tmp_path):
    """The comparison has a row per preset."""
    summary = {"preset": "demo", "loss_end": 2.5, "bytes_sent_per_island": 1_500_000, "ratio": 70.2}
    summary |= {"tokens_per_second": 5000.4, "wait_share": 0.25}
    for name, change in (("demo", {}), ("full", {"preset": "full", "ratio": 1.0})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_text(json.dumps(summary | change))
    text = compare.main([str(tmp_path), "full", "demo"])
    assert text.splitlines()[1].startswith("full") and "1.5 MB" in text and "25 %" in text
    assert json.loads((tmp_path / "compare.json").read_text())[1]["preset"] == "demo"
    assert (tmp_path / "compare.md").read_text().startswith("| preset")
