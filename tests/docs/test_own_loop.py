"""The loop of docs/checkpoints.md after a stop: what it saves is the place of the steps it took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fsdp_demo.checkpoint.files import read_part

from ..support import pages
from ..support.small import same

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_own_loop_saves_the_place_of_the_steps_it_took(run_ranks: Any, tmp_path: Path) -> None:
    """The place in the data that the loop of docs/checkpoints.md saves fits the step of a stop. A
    start after it ends with the model and the average of a run that was not stopped.
    """
    texts = [b.code for b in pages.blocks(PAGE.read_text(encoding="utf-8"))]
    (loop,) = (text for text in texts if "last=True" in text and "average" in text)
    told = "optimizer.zero_grad(); exchange.step == 2 and exchange.request_stop()"
    code = loop.replace("tempfile.mkdtemp()", repr(str(tmp_path / "ck")))
    code = code.replace("optimizer.zero_grad()", told)
    assert code.count("request_stop") == 1 and str(tmp_path) in code

    def job(me: Any, code: str) -> Any:
        torch.manual_seed(0)
        ended: dict[str, Any] = {}
        exec(code, ended)
        return [*ended["weights"]().values()], ended["average"], ended["rate"].get_last_lr()

    (found,) = run_ranks(job, islands=1, procs=1, args=(code,), check=False)
    assert found.status == 75, found.log
    (part,) = (tmp_path / "ck").glob("*/checkpoint-3/loop/rank0.json")
    assert read_part(part)[1]["rows"] == 12
    assert "ERROR" not in found.log  # a stop that was asked for is none
    assert "saved; to resume, start again with" in found.log
    resumed = code.replace(told, "optimizer.zero_grad()")
    (again,) = run_ranks(job, islands=1, procs=1, args=(resumed,))
    (whole,) = run_ranks(job, islands=1, procs=1, args=(loop,))
    assert same(again, whole)
