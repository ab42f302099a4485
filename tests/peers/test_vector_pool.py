"""The memory of vectors that come in every step."""

from __future__ import annotations

import torch

from fsdp_demo.peers.collectives import VectorPool
from fsdp_demo.peers.header import memory


def test_vector_pool_memory_used_again() -> None:
    """A vector has the memory of one that nobody holds any more."""
    pool = VectorPool(1000)
    first = pool.new_vector(1000).fill_(1.0)
    where = first.data_ptr()
    assert (first.shape, first.dtype) == ((1000,), torch.float32)
    del first
    again = pool.new_vector(1000)
    assert again.data_ptr() == where and again[0] == 1.0


def test_vector_pool_memory_held_by_reader() -> None:
    """The memory that a view of a vector, or a connection, still reads is given to nobody."""
    pool = VectorPool(1000)
    vector = pool.new_vector(1000)
    where, part = vector.data_ptr(), vector[10:20].view(torch.uint8)
    sent = memoryview(memory(part)).cast("B")
    del vector, part
    assert pool.new_vector(1000).data_ptr() != where
    del sent
    held = [pool.new_vector(1000) for _ in range(2)]
    assert where in [v.data_ptr() for v in held]


def test_vector_pool_other_length() -> None:
    """A vector of another length is a plain one, and its memory is not kept."""
    pool = VectorPool(1000)
    assert pool.new_vector(999).shape == (999,) and pool.new_vector(0).shape == (0,)
    assert not pool._free
