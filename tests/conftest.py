"""What all tests share."""

import faulthandler
import gc
import os
import random
import signal
import sys
from collections import defaultdict
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from zlib import crc32

# Processes that tests start have it from here, before they import torch: on cores that others use too, small networks
# are up to ten times slower on several threads.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
# What is compiled is kept: each of many processes would compile all of the project and of its tests anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import numpy as np
import pytest
import torch

sys.dont_write_bytecode = False
# The import of ART closes what TensorFlow logs to, which inside a test is pytest's own file: it comes first.
if find_spec("tensorflow") and find_spec("art"):
    import_module("robust_ext.adapters.art.library")
FEW = 2


def pytest_configure():
    """What holds for the whole process."""
    # Ctrl-C reaches processes that tests start, also where a shell in the background has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Times of single examples say nothing on cores that others use too.
    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    """Small networks are fastest on one thread, and several test processes share the cores."""
    torch.set_num_threads(1)


def _too_long(item):
    """Seconds after which a test is taken to hang."""
    return 120 if item.get_closest_marker("exhaustive") is None else 240


@contextmanager
def _ended_in_time(item, phase):
    """Waiting for what never comes fails: an alarm interrupts it, and no ``except Exception`` stops that."""

    def fail(*_):
        pytest.fail(f"{item.nodeid}: {phase} took more than {_too_long(item)} seconds")

    if not hasattr(signal, "setitimer") or item.config.option.usepdb:
        yield
        return
    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, _too_long(item))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _seeded():
    """What tests draw from the libraries' own streams is the same in any order and on any worker."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    _seeded()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    _seeded()
    with _ended_in_time(item, "setup"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    # What no alarm interrupts, as compiled code, ends the process; another takes its place and names the test.
    if not item.config.option.usepdb:
        faulthandler.dump_traceback_later(_too_long(item) + 30, exit=True)
    try:
        with _ended_in_time(item, "call"):
            return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    with _ended_in_time(item, "teardown"):
        return (yield)


def pytest_xdist_auto_num_workers():
    """One more than cores: many tests wait for processes of their own."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a test with many cases, in one class or several, a sixth is quick, and at least two; slow tests come first.

    The others are exhaustive. Which those are follows from their names, so that all processes agree, and every run.
    Tests come in this order so that no process is left with a slow one at the end.
    """
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("exhaustive") is None:
            cases[item.path, item.originalname].append(item)
    for several in cases.values():
        several.sort(key=lambda item: crc32(item.nodeid.encode(errors="replace")))
        for item in several[max(FEW, len(several) // 6) :]:
            item.add_marker(pytest.mark.exhaustive)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """Libraries and collected tests stay to the end; looking through them again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def _python_of(compiled):
    """The class that numba's ``jitclass`` was given, as plain Python."""
    methods = {name: method.py_func for name, method in compiled.class_type.jit_methods.items()}
    # Foolbox asks whether it is compiled already.
    return type(compiled.__name__, (), {**methods, "_ctor": SimpleNamespace(signatures=[()])})


@pytest.fixture
def uncompiled_brendel_bethge(monkeypatch):
    """Brendel-Bethge's own optimizers in Python: numba takes half a minute for each, anew in every test process."""
    for name in ("foolbox.attacks.brendel_bethge", "art.attacks.evasion.brendel_bethge"):
        module = sys.modules.get(name)
        for optimizer in ("BFGSB", "L0Optimizer", "L1Optimizer", "L2Optimizer", "LinfOptimizer"):
            compiled = getattr(module, optimizer, None)
            if hasattr(compiled, "class_type"):
                monkeypatch.setattr(module, optimizer, _python_of(compiled))
    # Compiled, it divides by zero without a word.
    with np.errstate(all="ignore"):
        yield
