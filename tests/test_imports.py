"""What is imported when, in one process of its own: a step looks at all that was imported up to it."""

import hashlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from robust_ext.reports import report_page
from tests.reports.test_pages import KINDS

STEPS = """
import contextlib, hashlib, importlib.util, json, os, sys, warnings

def imported(*names):
    return sorted({*names} & {*sys.modules})

import robust_ext
assert not imported("foolbox", "art", "matplotlib", "sklearn", "typer", "scipy.stats", "robust_ext.adapters"), "package"

import robust_ext.datasets
assert not imported("sklearn", "PIL"), "datasets"

import robust_ext.reports as reports
assert not imported("matplotlib", "jinja2", "PIL", "markupsafe", "rich"), "reports"

import robust_ext.testing.conformance
import torch
from robust_ext.registry.base import adapters
adapters()
robust_ext.as_attack(lambda model, x, y: x)
robust_ext.as_module(torch.nn.Linear(2, 2))
with contextlib.suppress(robust_ext.InvalidArgumentError):
    robust_ext.as_module(3)
assert not imported("foolbox", "art", "torchattacks", "adv_lib"), "adapters"
assert not imported("jax", "keras", "tensorflow", "xgboost", "lightgbm"), "frameworks"
assert not imported("matplotlib", "typer", "pytest", "distributed"), "adapters"

home, results = json.load(sys.stdin)
print(json.dumps([hashlib.sha256(reports.report_page(one).encode()).hexdigest() for one in results]), flush=True)
assert imported("matplotlib.figure"), "pages"
assert not imported("matplotlib.pyplot"), "pages"
"""
ADV_LIB = """
find = importlib.util.find_spec
if os.fork() == 0:
    # As on a Python without distutils.
    importlib.util.find_spec = lambda name, package=None: None if name == "distutils" else find(name, package)
    for name in [name for name in sys.modules if name.split(".")[0] == "distutils"]:
        del sys.modules[name]
    from robust_ext.adapters.adv_lib.library import adv_lib
    right = sys.modules["adv_lib.utils.projections"].use_tensors_in_clamp
    os._exit(0 if right and not [name for name in sys.modules if name.split(".")[0] == "distutils"] else 1)
assert os.wait()[1] == 0, "adv_lib without distutils"
missing = {name for name in ("visdom", "torchvision", "distutils") if find(name) is None}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    robust_ext.as_attack("adv_lib:ddn")
assert imported("adv_lib")
assert not {name for name in sys.modules if name.split(".")[0] in missing}, "stand-ins"
assert not {name for name in sys.modules if name.startswith("adv_lib.attacks.segmentation")}
"""
ART = """
os.environ["HOME"] = home
from robust_ext.adapters.art.library import art
import art.config
assert os.environ["HOME"] == art.config.ART_DATA_PATH.split("/.art")[0] == home, art.config.ART_DATA_PATH
assert art.attacks.evasion.FastGradientMethod
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="a step is taken in a fork")
def test_what_is_imported_when(tmp_path):
    """Nothing that is not needed yet; the pages made there are those made here; ART writes nothing to the home."""
    steps = [code for name, code in (("adv_lib", ADV_LIB), ("art", ART)) if find_spec(name) is not None]
    results = [make("pgd") for make in KINDS.values()]
    given = json.dumps([str(tmp_path), results])
    command = [sys.executable, "-c", "\n".join([STEPS, *steps])]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [hashlib.sha256(report_page(result).encode()).hexdigest() for result in results]
    assert list(tmp_path.iterdir()) == []
