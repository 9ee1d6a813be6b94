"""Imported first by the process that attacks' processes are forked from, or by these: nobody looks into any of them."""

import contextlib
import os
import sys
import warnings
from importlib import import_module
from pathlib import Path

from robust_ext.engine.isolation.process import MODULES, close_memory

# What an attack prints or warns of is not the judge's output.
os.dup2(2, 1)
warnings.simplefilter("ignore")
if sys.platform == "linux":
    # Where memory runs out, the attack ends and not its judge.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
close_memory()
for name in filter(None, os.environ.get(MODULES, "").split(",")):
    # One that cannot be imported is missed, if at all, where it is used.
    with contextlib.suppress(Exception):
        import_module(name)
