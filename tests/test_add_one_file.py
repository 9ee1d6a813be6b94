"""An attack or a defense of one's own: one file with one class, and one line in the list of all."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.defenses import catalogue as defenses
from robust_ext.registry import defense as registry

ATTACK = '''
import torch
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import NativeAttack, Step
from robust_ext.core.settings import setting, settings_class


@settings_class
class SignSteps(NativeAttack):
    """Steps along the sign of the gradient of the cross-entropy (Kurakin et al., 2016)."""

    name = "SignSteps"
    traits = AttackTraits(batching="full", norms=("linf",), seeds="none")

    steps: int = setting(10, "Gradients it takes.", minimum=1, trial=3, art="max_iter")

    def search(self, target, inputs, labels, *, threat_model, generator, targeted=False, watch=None):
        points = inputs
        for number in range(self.steps):
            x = points.detach().requires_grad_()
            losses = torch.nn.functional.cross_entropy(target.module(x), labels, reduction="none")
            (gradient,) = torch.autograd.grad(losses.sum(), x)
            moved = gradient.sign() * threat_model.epsilon / 4 * (-1 if targeted else 1)
            epsilon = threat_model.epsilon
            near = torch.minimum(torch.maximum(x.detach() + moved, inputs - epsilon), inputs + epsilon)
            points = near.clamp(*threat_model.bounds)
            if watch is not None:
                watch(Step(number, self.steps, points, losses.detach(), gradient))
        return points
'''

# In a process of its own: host classes are made from the list when their module is imported.
USE = """
import importlib, inspect, sys
import robust_ext.attacks.catalogue as catalogue
from sign_steps import SignSteps
catalogue.ATTACKS = (*catalogue.ATTACKS, SignSteps)

from typer.testing import CliRunner
from robust_ext.cli.app import app
from robust_ext.registry import as_attack
from robust_ext.registry.base import adapters
from robust_ext.reports.conformance import matrix_page
from robust_ext.testing.conformance import TARGETS, conformance_row

listed = CliRunner().invoke(app, ["attacks", "--library", "robust_ext"]).output
assert "robust_ext:SignSteps" in listed and "fixed epsilon" in listed, listed
assert as_attack("robust_ext:SignSteps(steps=7)").description == "SignSteps(steps=7)"
assert "steps: Gradients it takes." in SignSteps.__doc__
listing = next(one for one in adapters()["robust_ext"].list_attacks() if one.name == "SignSteps")
rows = {("robust_ext", "SignSteps", target): conformance_row("robust_ext", listing, target) for target in TARGETS}
assert all(row.outcome == "ran" for row in rows.values()), rows
assert rows["robust_ext", "SignSteps", "binarized"].verified > 0
page = matrix_page({"robust_ext": [listing]}, {key: row.outcome for key, row in rows.items()})
assert "| SignSteps | linf | fixed epsilon | full | gradients | last | ran | ran |  |" in page, page
foolbox = importlib.import_module("robust_ext.adapters.foolbox.attacks")
art = importlib.import_module("robust_ext.adapters.art.attacks")
assert "steps" in inspect.signature(foolbox.LinfSignStepsAttack).parameters
assert "max_iter" in inspect.signature(art.SignSteps).parameters
import pytest
chosen = "in_the_ball or fresh or attack_params"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", chosen, "test_sign_steps.py"]))
"""

INVARIANTS = """
from robust_ext.adapters.art.attacks import SignSteps
from robust_ext.adapters.foolbox.attacks import LinfSignStepsAttack
from robust_ext.testing.art_invariants import ArtAttackInvariants
from robust_ext.testing.foolbox_invariants import FoolboxAttackInvariants

class TestInFoolbox(FoolboxAttackInvariants):
    def make_attack(self):
        return LinfSignStepsAttack(steps=5)

class TestInArt(ArtAttackInvariants):
    def make_attack(self, estimator, **settings):
        return SignSteps(estimator, **{"eps": 0.2, **settings})
"""


@pytest.mark.skipif(any(find_spec(name) is None for name in ("foolbox", "art", "typer")), reason="hosts are missing")
def test_a_new_attack_is_one_file_and_one_line(tmp_path: Path) -> None:
    for name, text in {"sign_steps": ATTACK, "use": USE, "test_sign_steps": INVARIANTS}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


DEFENSE = '''
from robust_ext.core.modules import module_class
from robust_ext.core.settings import setting
from robust_ext.models.purifier import Purifier


@module_class
class Rounding(Purifier):
    """Rounds inputs to a few levels."""

    name = "rounding"

    steps: int = 1
    levels: int = setting(default=2, help="How many.", minimum=2)

    def step(self, point, *, x, number, state, rng):
        return (point * (self.levels - 1)).round() / (self.levels - 1)
'''


def test_a_new_defense_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rounding.py").write_text(DEFENSE)
    monkeypatch.syspath_prepend(tmp_path)
    rounding: Any = import_module("rounding").Rounding
    monkeypatch.setitem(defenses.NAMED, "rounding", rounding)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    x = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    defended = registry.as_defense("rounding(levels=3)", network, x[:2])
    torch.testing.assert_close(defended(x), network((x * 2).round() / 2))
    assert "levels: How many." in rounding.__doc__
    with pytest.raises(InvalidArgumentError, match="one of: levels"):
        registry.as_defense("rounding(level=3)", network, x)
    with pytest.raises(InvalidArgumentError, match="levels: got 1, expected an integer of at least 2"):
        registry.as_defense("rounding(levels=1)", network, x)
