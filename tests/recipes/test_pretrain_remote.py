"""recipes/pretrain.py with copies of its checkpoints in a store of objects: a machine that is gone
with its disk.
"""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from fsdp_demo.checkpoint.remote import ObjectStore  # noqa: E402

from ..support.s3 import S3  # noqa: E402
from .test_pretrain_resume import assert_same, shape, source, train  # noqa: E402, F401

OPTIONS = ["--no-shard", "--exchange", "diloco", "--set", "period=4", "--save-every", 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_pretrain_machine_gone_with_its_disk(run_ranks, source, kind):  # noqa: F811
    """Two islands are killed, and the disk of one is gone: the resumed run, from the store, is the
    second part of the undisturbed one, bit for bit.
    """
    s3 = S3() if kind == "s3" else None
    url, env = f"file://{source}/store", {"LOCAL_RANK": "-1"}
    if s3 is not None:
        url, env = s3.url, env | s3.env
    runs = shape(2, 1) | {"env": env, "timeout": 250}
    whole = run_ranks(train, args=(source, source / "whole", OPTIONS), **runs)

    def dies(rank):
        def kill(rank):
            store = ObjectStore(url)
            while sum("checkpoint-6/" in k and "rank0/manifest" in k for k in store.sizes()) < 2:
                time.sleep(0.05)
            rank.meet("dead")
            os.kill(os.getpid(), signal.SIGKILL)

        train(rank, source, source / "part", [*OPTIONS, "--remote", url], {8: kill})

    assert [o.status for o in run_ranks(dies, **runs, check=False)] == [-9, -9]
    shutil.rmtree(source / "part" / "island1")
    options = [*OPTIONS, "--remote", url, "--resume"]
    resumed = run_ranks(train, args=(source, source / "part", options), **runs)
    assert_same(whole, resumed, 6)
    if s3 is not None:
        s3.close()
