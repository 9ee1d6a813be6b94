"""Threads follow the cores that other processes leave free."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from robust_ext.core import machine
from robust_ext.core.machine import lap, on_free_cores


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("others", "expected"), [(0.0, 4), (0.4, 4), (1.0, 3), (2.2, 2), (3.0, 1), (3.9, 1), (9.0, 1)])
def test_a_thread_for_each_free_core(monkeypatch, four_threads, others, expected):
    """Four cores, on which this process uses two and others so many."""
    clock = iter(range(100))

    def usage():
        now = next(clock)
        return time.perf_counter() - 50 + now, (2 + others) * now, 2 * now

    monkeypatch.setattr(machine, "_usage", usage)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    with on_free_cores():
        for _ in range(3):
            lap()
        assert torch.get_num_threads() == expected
        with on_free_cores():
            lap(own=False)
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 4


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc/stat")
def test_busy_processes_leave_one_thread(four_threads):
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        with on_free_cores():
            end = time.monotonic() + 20
            while torch.get_num_threads() > 1 and time.monotonic() < end:
                torch.rand(300, 300) @ torch.rand(300, 300)
                lap()
            assert torch.get_num_threads() == 1
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
