"""Between device and host: in which order streams and events are asked, and who waits. Streams are
played (`support/accelerator.py`).
"""

from __future__ import annotations

import threading

import pytest
import torch

from fsdp_demo.compression.windows import pinned, pinned_vector, upload
from fsdp_demo.exchange.sending import Staging

from ..support.accelerator import DEVICE, Accelerator, There, plug_in

CPU = torch.device("cpu")


def test_staging_copy_on_own_stream() -> None:
    """The copy to the host runs on a stream of its own: it begins behind what training has queued,
    and only the thread that sends waits for it.
    """
    with plug_in() as plug, Accelerator():
        staging, tensors = Staging(DEVICE), [torch.arange(n, device=DEVICE) for n in (3, 5)]
        waits = staging.to_host(tensors)
        assert plug.log == [
            "stream1 waits for training",
            "to stream1",
            *["room"] * 2,
            "event on stream1",
            "from stream1",
        ]
        # their memory is not handed on before they are copied
        assert plug.streams[1].held == tensors
        plug.log.clear()
        found: list[torch.Tensor] = []
        worker = threading.Thread(target=lambda: found.extend(waits()), name="worker")
        worker.start()
        worker.join()
        assert plug.log == ["worker waits for stream1"]
        assert [t.tolist() for t in found] == [[0, 1, 2], [0, 1, 2, 3, 4]]
        assert all(
            not isinstance(t, There) and t.untyped_storage()._cdata in Accelerator.pinned
            for t in found
        )
        assert staging.to_host([])() == [] and len(plug.streams) == 2


def test_staging_wait_sleeps() -> None:
    """A thread that waits for CUDA sleeps. By default it would keep a core busy until the step is
    done, one for each rank.
    """
    with plug_in() as plug:
        for device in (torch.device("cuda", 0), DEVICE):
            Staging(device).to_host([])
        assert plug.blocking == [True, False]


def test_staging_upload_without_wait() -> None:
    """The copy to the device waits for nothing."""
    with plug_in() as plug, Accelerator() as mode:
        arrived = [torch.arange(8, dtype=torch.uint8)[1:6], torch.ones(3)]
        listed = Staging(DEVICE).pin(arrived)
        assert listed is arrived
        there = [t[1:].to(DEVICE, non_blocking=True) for t in listed]  # a section of a message
        there.append(upload(torch.arange(4), DEVICE))
        with mode.waiting():
            assert [t.cpu().tolist() for t in there] == [[2, 3, 4, 5], [1.0, 1.0], [0, 1, 2, 3]]
        assert set(plug.log) == {"room"}


def test_staging_pinned_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in pinned memory, as a mean that was received there, is not copied again."""
    with plug_in():
        monkeypatch.setattr(
            torch.Tensor,
            "is_pinned",
            lambda t: t.untyped_storage()._cdata in Accelerator.pinned,
        )
        mean, body = pinned_vector(DEVICE, 8), torch.ones(3)
        found = Staging(DEVICE).pin([mean[2:], body])
        assert found[0].data_ptr() == mean[2:].data_ptr() and found[1] is not body
        assert all(t.is_pinned() for t in found)


def test_staging_no_copy_on_cpu() -> None:
    """On a CPU nothing is copied."""
    staging, tensors = Staging(CPU), [torch.ones(3), torch.zeros(2)]
    sent = staging.to_host(tensors)()
    assert all(a is b for a, b in zip(sent, tensors, strict=True))
    assert all(a is b for a, b in zip(staging.pin(list(tensors)), tensors, strict=True))
    assert upload(tensors[0], CPU) is tensors[0]


def test_staging_pinned_room_size() -> None:
    """The pinned room is as large as the tensor."""
    with plug_in(), Accelerator():
        room = pinned(torch.ones(3, 5, dtype=torch.bfloat16, device=DEVICE)[:, 1:3])
    assert room.shape == (3, 2)
    assert room.dtype == torch.bfloat16
    assert room.device == CPU
    assert room.is_contiguous()
