"""Memory of freed tensors is kept, and handed back at the end of a block."""

import sys
from pathlib import Path

import pytest
import torch

from robust_ext.core import machine as heap

resource = pytest.importorskip("resource")

BLOCKS, SIZE = 8, 8 * 2**20


@pytest.fixture
def afresh():
    heap.keep_freed_memory.cache_clear()
    yield
    heap.keep_freed_memory.cache_clear()


def faults():
    """Pages that the system hands out for large tensors that are made and dropped again and again."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        made = [torch.ones(SIZE // 4) for _ in range(BLOCKS)]
        del made
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def held():
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not heap.keep_freed_memory(), reason="another C library than glibc, or set by its user")
def test_freed_memory_is_used_again_and_handed_back_at_the_end():
    with heap.trimmed():
        faults()
    before = held()
    with heap.trimmed():
        faults()
        # One round takes 16,384 pages of 4 KiB.
        assert faults() < 1000
        assert held() - before > BLOCKS * SIZE / 2
    assert held() - before < BLOCKS * SIZE / 4


@pytest.mark.parametrize("chosen", [("MALLOC_MMAP_THRESHOLD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.top_pad=1")])
def test_what_a_user_chose_stands(afresh, monkeypatch, chosen):
    monkeypatch.setenv(*chosen)
    assert heap.keep_freed_memory() is False


def test_other_systems_are_left_alone(afresh, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert heap.keep_freed_memory() is False
    with heap.trimmed():
        pass
