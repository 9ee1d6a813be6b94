"""What the README and the pages show is what happens; what CONTRIBUTING.md adds in one file is found everywhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import robust_ext
from robust_ext.cli import app as cli
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_every_block_is_run_here():
    counts = {page.name: len(blocks(page)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if blocks(page)}
    assert counts == {"README.md": 1, "CONTRIBUTING.md": 4, "libraries.md": 1, "binarization.md": 1}


def test_the_detector_runs_through_both_tests(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(blocks("docs/binarization.md")[0])
    digits = load_dataset("digits")
    inputs, _ = digits.take(digits.choose(104, seed=0))
    result = robust_ext.binarization_test(
        digits_network(),
        "foolbox:LinfPGD(steps=2)",
        inputs[:4],
        robust_ext.ThreatModel(norm="linf", epsilon=0.1),
        detector=f"{file}:Unsure",
        detector_data=inputs[4:],
        inner_points=20,
    )
    (attack,) = result.content["attacks"]
    documented = set(re.findall(r"`(\w+)`", RESULTS.split("With a detector, an attack has ")[1]))
    assert {*attack, *attack["tests"], *attack["tests"]["regular"]["planting"]} <= documented


def test_the_lines_for_art_run(capsys):
    pytest.importorskip("robust_ext.adapters.art.estimators", reason="ART is not installed")
    import torch

    from robust_ext.adapters.libraries import load_art

    digits = load_dataset("digits")
    inputs, _ = digits.take(digits.choose(4, seed=0))
    classifier = load_art().estimators.classification.PyTorchClassifier(
        digits_network(), loss=torch.nn.CrossEntropyLoss(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1)
    )
    classifier.model.eval()
    given = {
        "classifier": classifier,
        "x": inputs.numpy(),
        "attack_class": load_art().attacks.evasion.FastGradientMethod,
    }
    exec(blocks("docs/libraries.md")[0], given)  # noqa: S102 - our own README
    assert 0 <= float(capsys.readouterr().out) <= 1


def test_the_five_lines_run(capsys):
    code = blocks("README.md")[0]
    digits = load_dataset("digits")
    inputs, _ = digits.take(digits.choose(4, seed=0))
    attack = robust_ext.as_attack("foolbox:LinfPGD(steps=2)")
    exec(code, {"model": digits_network(), "attack": attack, "inputs": inputs})  # noqa: S102 - our own README
    assert "foolbox:LinfPGD(steps=2)" in capsys.readouterr().out


def test_the_first_screen_is_the_demonstration(tmp_path):
    """The table of the README agrees with the command in everything but the seconds; one recipe passes, three fail."""
    (shown,) = re.findall(r"```text\n(verdict.*?)```", README, re.DOTALL)

    def without_seconds(table):
        return [re.sub(r"\s+[\d.]+$", "", line) for line in table.splitlines() if line and not line.startswith("-")]

    done = CliRunner().invoke(cli.app, ["demo", "--no-progress", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert without_seconds(done.output.split("\n\n")[0]) == without_seconds(shown)
    content = json.loads((tmp_path / "result.json").read_text())
    assert [attack["verdict"] for attack in content["attacks"]] == ["passed", "failed", "failed", "failed"]


def test_commands_name_what_exists():
    scripts = re.findall(r"\((examples/[a-z_]+\.py)\)", README)
    assert len(scripts) == 3
    assert all((ROOT / script).exists() for script in scripts)
    # The demonstration, the tests, and the libraries among them whose own requirements are too strict.
    assert README.count("constraints.txt") == 3


def test_documented_keys_are_those_of_a_result(tmp_path):
    digits = load_dataset("digits")
    inputs, _ = digits.take(digits.choose(4, seed=0))
    robust_ext.binarization_test(
        digits_network(),
        "foolbox:LinfPGD(steps=2)",
        inputs,
        robust_ext.ThreatModel(norm="linf", epsilon=0.1),
        inner_points=20,
        out=tmp_path,
    )
    content = json.loads((tmp_path / "result.json").read_text())
    first_columns = [line.split("|")[1] for line in RESULTS.splitlines() if line.startswith("| `")]
    documented = {name for cell in first_columns for name in re.findall(r"`(\w+)(?:\[\])?`", cell)}
    assert documented == set(content) | set(content["attacks"][0])


@pytest.mark.parametrize("broken", [False, True])
def test_a_third_party_adapter_is_found(broken, tmp_path):
    """A package with an entry point, as a stranger would install it."""
    code = blocks("CONTRIBUTING.md")[3]
    (tmp_path / "stranger.py").write_text(code.replace("ADAPTER = MyAdapter()", "ADAPTER = 3") if broken else code)
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[robust_ext.adapters]\nmylibrary = stranger:ADAPTER\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import robust_ext; print(robust_ext.as_attack('mylibrary:Nothing(a=1)'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if broken:
        assert "entry point 'mylibrary'" in done.stderr
    else:
        assert done.stdout.strip() == "CallableAttack(mylibrary:Nothing(a=1))", done.stderr


ADDED = """
import importlib, runpy, sys
from robust_ext.attacks import catalogue as attacks
from robust_ext.defenses import catalogue as defenses
from robust_ext.detectors import catalogue as detectors

sys.path.insert(0, {folder!r})
attacks.ATTACKS += (importlib.import_module("sign_noise").SignNoise,)
detectors.DETECTORS["unsure"] = importlib.import_module("unsure").UnsureDetector
detectors.PUBLISHED += (detectors.DETECTORS["unsure"],)
defenses.DEFENSES += (importlib.import_module("shrinking").Shrinking,)
defenses.NAMED["shrinking"] = defenses.DEFENSES[-1]

# The command line.
from typer.testing import CliRunner
from robust_ext.cli.app import app
shown = CliRunner().invoke(app, ["attacks", "--library", "robust_ext"])
assert "robust_ext:SignNoise" in shown.output, shown.output
# Both host libraries, with their names and a signature.
import inspect
from robust_ext.adapters.art import attacks as in_art
from robust_ext.adapters.foolbox import attacks as in_foolbox
assert {{"LinfSignNoiseAttack", "L2SignNoiseAttack", "L1SignNoiseAttack"}} <= set(in_foolbox.__all__)
for made in (in_foolbox.LinfSignNoiseAttack, in_art.SignNoise):
    assert inspect.signature(made).parameters["scale"].default == 1.0, made
# Documentation.
page = runpy.run_path({generate!r})["generate"]()
(settings,) = [text for path, text in page.items() if path.name == "settings.md"]
assert all(name in settings for name in ("SignNoise", "UnsureDetector", "Shrinking")), settings[-2000:]
# They run: the attack in an evaluation and as both hosts' class, the detector and the defense by name.
import torch, robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
network, (x, y) = digits_network(), load_dataset("digits").take(range(24))
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.25)
result = robust_ext.robust_accuracy(network, "robust_ext:SignNoise(scale=0.5)", x, y, threat_model)
assert 0 < result.robust_accuracy(0.25) <= 1
import foolbox
from art.estimators.classification import PyTorchClassifier
model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
_, points, _ = in_foolbox.LinfSignNoiseAttack(seed=0)(model, x, y, epsilons=0.25)
assert abs(float((points - x).abs().max()) - 0.25) < 1e-6
classifier = PyTorchClassifier(network, torch.nn.CrossEntropyLoss(), (1, 8, 8), 10, clip_values=(0, 1))
theirs = in_art.SignNoise(classifier, eps=0.25, seed=0, verbose=False).generate(x.numpy(), y.numpy())
assert torch.equal(torch.from_numpy(theirs), points)
from robust_ext.evaluations.mead.fitting import fit_detector
assert fit_detector("unsure", network, x, y, power=2.0).score(x).shape == (24,)
defense = robust_ext.as_defense("shrinking", network, x)
assert torch.equal(defense(x), network(x * 0.9 * 0.9))
# The tests of every attack find it.
import pytest
code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "SignNoise", {tests!r}])
assert code == 0, code
"""


def test_one_file_and_one_line_add_an_attack_a_detector_and_a_defense(tmp_path):
    for name, code in zip(("sign_noise", "unsure", "shrinking"), blocks("CONTRIBUTING.md"), strict=False):
        (tmp_path / f"{name}.py").write_text(code)
    script = ADDED.format(
        folder=str(tmp_path), generate=str(ROOT / ".ci" / "generate_settings.py"), tests=str(ROOT / "tests" / "attacks")
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
