"""Imported first by the process that attacks' processes are forked from, or by these: nobody looks into any of them."""

import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from robust_ext.engine.isolation.process import close_memory

# What an attack prints or warns of is not the judge's output.
os.dup2(2, 1)
warnings.simplefilter("ignore")
if sys.platform == "linux":
    # Where memory runs out, the attack ends and not its judge.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
close_memory()
