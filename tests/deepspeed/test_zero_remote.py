"""DeepSpeed's checkpoints in a store of objects: a replica whose disk is gone goes on."""

from __future__ import annotations

import shutil

from fsdp_demo import status

from ..support import zero
from .test_zero_resume import alike, load, save


def test_zero_resume_without_its_disk(run_ranks, tmp_path) -> None:
    """The tag comes back from the store, below the name of DIR and of the replica."""
    remote = f"file://{tmp_path}/store"

    def saves(me, *args):
        out = save(me, *args, remote=remote)
        status.do_last()
        return out

    args = (tmp_path, zero.settings("zero2"), "diloco", True)
    saved = run_ranks(saves, args=args)
    assert list((tmp_path / "store/disk1/island1").glob("global_step*/*/rank0/manifest.json"))
    shutil.rmtree(tmp_path / "disk1")
    loaded = run_ranks(lambda me, *args: load(me, *args, remote=remote), args=args)
    for before, after in zip(saved, loaded, strict=True):
        alike(before, after)
