"""`fsdp-demo inspect`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_demo import cli
from fsdp_demo.checkpoint.choice import HeldCheckpoint, choose


def saved_run(rank) -> str:
    """Two islands; checkpoints after steps 3 (nothing under way) and 4 (a payload under way)."""
    from fsdp_demo import attach
    from fsdp_demo.checkpoint import save_exchange

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 10))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    changes = {"schedule.delay": 1, "codec.value_dtype": "bf16"}
    exchange = attach(optimizer, "diloco", model=model, period=2, **changes)
    own = rank.folder / "run" / f"island{rank.island}"
    for step in range(1, 5):
        model(torch.ones(1, 20)).sum().backward()
        exchange.report(tokens=7)
        optimizer.step()
        optimizer.zero_grad()
        if step > 2:
            save_exchange(own / f"checkpoint-{step}" / "exchange", exchange)
    exchange.finish()
    return str(rank.folder / "run")


@pytest.fixture
def run_folder(run_ranks) -> Path:
    return Path(run_ranks(saved_run, islands=2, procs=2)[0])


@pytest.fixture
def inspected(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], tuple[int, Any]]:
    """Exit status and the list that `--json` prints, or the error."""

    def call(folder: Path) -> tuple[int, Any]:
        status = cli.main(["inspect", "--json", str(folder)])
        said = capsys.readouterr()
        return status, json.loads(said.out) if said.out else said.err

    return call


def test_inspect_says_what_is_in_a_run(run_folder, inspected, capsys) -> None:
    """`fsdp-demo inspect` names the checkpoints of a run, their owners and settings."""
    status, found = inspected(run_folder)
    assert status == 0 and [(f["step"], f["holds"]) for f in found] == [
        (step, {str(i): f"island{i}"}) for i in range(2) for step in (3, 4)
    ]
    one, late = found[0], found[1]
    assert one["complete"] and one["problems"] == []
    facts = dict(preset="diloco", islands=2, topology="islands", shards=1, copies=2, in_flight=[])
    facts |= dict(parameters=910, frozen=30, tokens=2 * 3 * 7)
    assert facts.items() <= one.items()
    of_delta = {"schedule.sync_every": 2, "schedule.delay": 1, "codec.value_dtype": "bf16"}
    assert one["settings"] == {f"delta.{name}": value for name, value in of_delta.items()}
    assert one["states"] == {"delta": {"anchor": 910 * 4, "momentum": 910 * 4}}
    assert [(f["step"], f["channels"]) for f in late["in_flight"]] == [(3, ["delta"])]
    assert late["in_flight"][0]["bytes"] > 0
    assert one["versions"]["format"] == 3 and one["bytes"] > 2 * 910 * 4
    newest = [run_folder / f"island{i}" / "checkpoint-4" for i in range(2)]
    assert cli.main(["inspect", str(newest[0])]) == cli.main(["inspect", str(newest[1])]) == 0
    text = capsys.readouterr().out
    took = "took part         in the last exchange 0 and 1 of 2\n"
    of_it = "island1/checkpoint-4", "56, of island 0", "56, of island 1", "sync_every=2"
    for wanted in (took, *of_it, "anchor 3.64 kB", "sent in step 4 by delta"):
        assert wanted in text, text
    assert cli.main(["inspect", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("whole on all islands: 3 and 4\n"), text
    assert f"\n{newest[1]}: step 4 of island 1, diloco; whole\n" in text, text


def described(step: int, island: int, islands: int, took: list[int] | None = None) -> Any:
    """What `inspect` says of one checkpoint, as far as `shared` reads it."""
    known = HeldCheckpoint(step, owner=island, participants=json.dumps(took) if took else "")
    return {
        **dict(step=step, islands=islands, complete=True, gone=[]),
        "held": {str(island): known.note()},
        "holds": {str(island): f"island{island}"},
        "participants": list(range(islands)) if took is None else took,
    }


TAKES_OVER = "takes over from them"


@pytest.mark.parametrize(("found", "says"), [
    ([described(s, i, 2) for i in (0, 1) for s in (50, 100)], "on all islands: 50 and 100"),
    # a disk of its own
    ([described(s, 0, 2) for s in (50, 100)],
        "the islands whose folders are here (island 0 of 2): 50 and 100\n"
        "the folders here say nothing of that of 1: look there, too"),
    # an old folder of an island that was dropped
    ([*(described(s, i, 2) for i in (0, 1) for s in (95, 100)), described(50, 2, 3)],
        "whole on all islands: 95 and 100"),
    ([*(described(s, i, 3, [0, 1]) for i in (0, 1) for s in (95, 100)), described(50, 2, 3)],
        "whole on all islands: no step\nin step 100, the newest, took part: 0 and 1 of 3\n"
        f"with --resume auto: islands 0 and 1 from step 100, island 2 {TAKES_OVER}"),
    # the newest save is that of a newcomer which had not taken part yet
    ([*(described(s, 0, 3, [1, 2]) for s in (100, 440)),
        *(described(s, i, 3, [1, 2]) for i in (1, 2) for s in (100, 400, 420))],
        "whole on all islands: 100\nin step 440, the newest, took part: 1 and 2 of 3\n"
        f"with --resume auto: islands 1 and 2 from step 420, island 0 {TAKES_OVER}"),
    # who took part last holds nothing that fits another's
    ([described(10, 0, 2), described(20, 1, 2)], "whole on all islands: no step\n"
        f"with --resume auto: island 1 from step 20, island 0 {TAKES_OVER}"),
])  # fmt: skip
def test_inspect_says_of_which_islands_a_step_is_whole(found: list[Any], says: str) -> None:
    """The summary of `inspect` says which islands share which step."""
    from fsdp_demo.tools.inspect_words import shared

    assert shared(found).endswith(says), shared(found)


def test_inspect_of_several_begins_with_the_summary() -> None:
    """Of several checkpoints `inspect` says first what the islands share, then a line on each."""
    from fsdp_demo.tools.inspect_words import overview

    here = [described(5, i, 2) | {"folder": f"i{i}/5", "preset": "demo"} for i in range(2)]
    torn = {"folder": "i1/6", "complete": False, "problems": ["i1/6/rank0.json is damaged"]}
    assert overview([*here, torn]).splitlines() == [
        "whole on all islands: 5",
        "",
        "i0/5: step 5 of island 0, demo; whole",
        "i1/5: step 5 of island 1, demo; whole",
        "i1/6: NOT READABLE: i1/6/rank0.json is damaged",
        "",
        "what one of them holds: fsdp-demo inspect CHECKPOINT",
    ]
    lost = here[1] | {"complete": False, "problems": ["i1/5/model.bin is missing"]}
    assert "i1/5: step 5 of island 1, demo; NOT WHOLE: i1/5/model.bin is missing" in overview(
        [here[0], lost]
    )


def test_inspect_counts_an_early_part(tmp_path, inspected, capsys) -> None:
    """An island that has left after an early part took part, as exchanges.jsonl says; a resume
    counts it as away.
    """
    from fsdp_demo import attach
    from fsdp_demo.checkpoint import save_exchange
    from fsdp_demo.exchange.saved_state import History
    from fsdp_demo.tools.inspect_words import shared

    exchange = attach(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]), "local_sgd")
    exchange._queue.history = History(2, early=(1,))
    folder = tmp_path / "checkpoint-0"
    save_exchange(folder / "exchange", exchange)
    exchange.detach()
    _, (found,) = inspected(folder)
    assert found["participants"] == exchange.participants == [0, 1] and found["gone"] == [1]
    assert found["held"]["0"][-1] == "[0]"
    assert cli.main(["inspect", str(folder)]) == 0
    assert "in the last exchange 0 and 1 of 1; gone since: 1" in capsys.readouterr().out
    islands = [found | {"islands": 2, "holds": {str(i): f"island{i}"}} for i in range(2)]
    assert "in step 0, the newest, took part: 0 and 1 of 2; gone since: 1" in shared(islands)


def test_inspect_tokens_of_islands() -> None:
    """The number of tokens says of which islands it is the sum."""
    from fsdp_demo.tools.inspect_words import of_islands

    assert of_islands([2, 0]) == "the sum over islands 0 and 2"
    assert of_islands([1]) == "of island 1"


def test_inspect_says_what_a_resume_does() -> None:
    """The summary of `inspect` says what a resume does. (The numbers are those of a run that was
    rolled back by 320 steps against what `inspect` had said.)
    """
    from fsdp_demo.tools.inspect_words import shared

    steps = [(100,), (100, 400, 420), (100, 400, 420)]
    found = [described(s, i, 3, [1, 2]) for i in range(3) for s in steps[i]]
    held = [
        [HeldCheckpoint(*f["held"][str(i)]) for f in found if str(i) in f["held"]] for i in range(3)
    ]
    chosen = choose("abc", held, "newest") or []
    assert [state and state.step for state in chosen] == [None, 420, 420]
    assert shared(found).endswith("islands 1 and 2 from step 420, island 0 takes over from them")


def test_inspect_says_what_is_missing_or_damaged(run_folder, inspected, capsys) -> None:
    """`inspect` names each file of a checkpoint that is missing or damaged."""
    exchange = run_folder / "island0" / "checkpoint-3" / "exchange"
    tensors = exchange / "rank1.safetensors"
    good = tensors.read_bytes()
    tensors.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    status, (found,) = inspected(exchange.parent)
    assert status == 1
    assert not found["complete"]
    assert found["problems"] == [f"{tensors} is damaged, its checksum does not fit"]
    tensors.write_bytes(good)
    (exchange / "rank1.json").unlink()
    status, (found,) = inspected(exchange)
    assert status == 1
    assert found["problems"] == ["island 0 lacks the part of rank 1"]
    assert found["step"] == 3
    (exchange / "rank0.json").write_text("{")
    status, error = inspected(exchange.parent)
    assert status == 2
    assert "rank0.json is damaged" in error
    assert error.startswith("fsdp-demo: error: ")
    assert error.count("\n") == 1
    assert cli.main(["inspect", str(run_folder)]) == 1
    text = capsys.readouterr().out
    assert "NOT READABLE: " in text and "whole on all islands: 4" in text


def test_inspect_checks_the_files_that_a_manifest_names(run_folder: Path, inspected) -> None:
    """`inspect` checks the files that a manifest names."""
    folder = run_folder / "island0" / "checkpoint-3"
    (folder / "model.bin").write_bytes(b"123")
    (folder / "manifest.json").write_text(
        json.dumps({"version": 1, "files": {"model.bin": {"bytes": 3, "crc32": 0x884863D2}}})
    )
    assert inspected(folder)[0] == 0
    (folder / "model.bin").write_bytes(b"124")
    status, (found,) = inspected(folder)
    assert status == 1
    assert found["problems"] == [f"{folder / 'model.bin'} is damaged, its checksum does not fit"]
    (folder / "model.bin").unlink()
    assert inspected(folder)[1][0]["problems"] == [f"{folder / 'model.bin'} is missing"]


@pytest.mark.parametrize("make, says", [(False, "no such folder"), (True, "holds no checkpoint")])
def test_inspect_refuses_other_folders(tmp_path, capsys, make: bool, says: str) -> None:
    """`inspect` refuses a folder without checkpoints."""
    folder = tmp_path / "run"
    if make:
        (folder / "island0").mkdir(parents=True)
        (folder / ".checkpoint-4.part").mkdir()
    assert cli.main(["inspect", str(folder)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
