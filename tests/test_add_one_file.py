"""What CONTRIBUTING.md adds in one file and one line is found everywhere: an attack, a detector and a defense."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.test_readme import ROOT, blocks

# In a process of its own: host classes are made from the list when their module is imported.
ADDED = """
import importlib, inspect, runpy, sys
from robust_ext.attacks import catalogue as attacks
from robust_ext.defenses import catalogue as defenses
from robust_ext.detectors import catalogue as detectors
attacks.ATTACKS += (importlib.import_module("sign_noise").SignNoise,)
detectors.DETECTORS["unsure"] = importlib.import_module("unsure").UnsureDetector
detectors.PUBLISHED += (detectors.DETECTORS["unsure"],)
defenses.DEFENSES += (importlib.import_module("shrinking").Shrinking,)
defenses.NAMED["shrinking"] = defenses.DEFENSES[-1]

# The command line, the registry and the matrix of attacks.
import pytest, torch, robust_ext
from typer.testing import CliRunner
from robust_ext.cli.app import app
from robust_ext.registry.base import adapters
from robust_ext.reports.conformance import matrix_page
from robust_ext.testing.conformance import TARGETS, conformance_row
shown = CliRunner().invoke(app, ["attacks", "--library", "robust_ext"]).output
assert "robust_ext:SignNoise" in shown and "fixed epsilon" in shown, shown
assert robust_ext.as_attack("robust_ext:SignNoise(scale=0.5)").description == "SignNoise(scale=0.5)"
listing = next(one for one in adapters()["robust_ext"].list_attacks() if one.name == "SignNoise")
rows = {("robust_ext", "SignNoise", target): conformance_row("robust_ext", listing, target) for target in TARGETS}
page = matrix_page({"robust_ext": [listing]}, {key: row.outcome for key, row in rows.items()})
assert "| SignNoise | linf l2 l1 | fixed epsilon | full |  | last | ran | ran |  |" in page, page
# Both host libraries, with their names and a signature.
from robust_ext.adapters.art import attacks as in_art
from robust_ext.adapters.foolbox import attacks as in_foolbox
assert {"LinfSignNoiseAttack", "L2SignNoiseAttack", "L1SignNoiseAttack"} <= set(in_foolbox.__all__)
for made in (in_foolbox.LinfSignNoiseAttack, in_art.SignNoise):
    assert inspect.signature(made).parameters["scale"].default == 1.0, made
# Documentation.
(root,) = sys.argv[1:]
page = runpy.run_path(root + "/.ci/generate_settings.py")["generate"]()
settings = "".join(text for path, text in page.items() if path.name.startswith("settings_"))
assert all(name in settings for name in ("SignNoise", "UnsureDetector", "Shrinking")), settings[-2000:]
# They run: the attack in an evaluation and as both hosts' class, the detector and the defense by name.
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
network, (x, y) = digits_network(), load_dataset("digits").take(range(24))
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.25)
robust_ext.robust_accuracy(network, "robust_ext:SignNoise(scale=0.5)", x, y, threat_model)
import foolbox
from art.estimators.classification import PyTorchClassifier
model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
_, points, _ = in_foolbox.LinfSignNoiseAttack(seed=0)(model, x, y, epsilons=0.25)
assert abs(float((points - x).abs().max()) - 0.25) < 1e-6
classifier = PyTorchClassifier(network, torch.nn.CrossEntropyLoss(), (1, 8, 8), 10, clip_values=(0, 1))
theirs = in_art.SignNoise(classifier, eps=0.25, seed=0, verbose=False).generate(x.numpy(), y.numpy())
assert torch.equal(torch.from_numpy(theirs), points)
assert robust_ext.fit_detector("unsure", network, x, y, power=2.0).score(x).shape == (24,)
defense = robust_ext.as_defense("shrinking(factor=0.5)", network, x)
assert torch.equal(defense(x), network(x * 0.5 * 0.5))
# The invariants of both hosts hold. pytest would have liked to rewrite the package before it was imported.
options = ["-q", "-p", "no:cacheprovider", "-m", "", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
assert pytest.main([*options, "-k", "in_the_ball or fresh or attack_params", "test_invariants.py"]) == 0
"""

INVARIANTS = """
from robust_ext.adapters.art.attacks import SignNoise
from robust_ext.adapters.foolbox.attacks import LinfSignNoiseAttack
from robust_ext.testing.art_invariants import ArtAttackInvariants
from robust_ext.testing.foolbox_invariants import FoolboxAttackInvariants
class TestInFoolbox(FoolboxAttackInvariants):
    def make_attack(self):
        return LinfSignNoiseAttack()
class TestInArt(ArtAttackInvariants):
    def make_attack(self, estimator, **settings):
        return SignNoise(estimator, **{"eps": 0.2, **settings})
"""


@pytest.mark.skipif(any(find_spec(name) is None for name in ("foolbox", "art", "typer")), reason="hosts are missing")
@pytest.mark.exhaustive
def test_one_file_and_one_line_add_an_attack_a_detector_and_a_defense(tmp_path):
    files = dict(zip(("sign_noise", "unsure", "shrinking"), blocks("CONTRIBUTING.md"), strict=False))
    for name, code in (files | {"use": ADDED, "test_invariants": INVARIANTS}).items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-W", "ignore", "use.py", str(ROOT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
