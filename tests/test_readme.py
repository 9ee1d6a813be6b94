"""What the README shows is what happens."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_every_block_is_run_here():
    assert len(BLOCKS) == 3


def test_the_detector_runs_through_both_tests(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(BLOCKS[2])
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
    exec(BLOCKS[1], given)  # noqa: S102 - our own README
    assert 0 <= float(capsys.readouterr().out) <= 1


def test_the_five_lines_run(capsys):
    code = BLOCKS[0]
    digits = load_dataset("digits")
    inputs, _ = digits.take(digits.choose(4, seed=0))
    attack = robust_ext.as_attack("foolbox:LinfPGD(steps=2)")
    exec(code, {"model": digits_network(), "attack": attack, "inputs": inputs})  # noqa: S102 - our own README
    assert "foolbox:LinfPGD(steps=2)" in capsys.readouterr().out


def test_the_first_screen_is_the_demonstration():
    """The table of the README agrees with a run in everything but the seconds."""
    from robust_ext.demo.run import run_demo

    (shown,) = re.findall(r"```text\n(verdict.*?)```", README, re.DOTALL)

    def without_seconds(table):
        return [re.sub(r"\s+[\d.]+$", "", line) for line in table.splitlines() if line and not line.startswith("-")]

    table = str(run_demo()).split("\n\n")[0]
    assert without_seconds(table) == without_seconds(shown)


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
    (tmp_path / "stranger.py").write_text(
        "from robust_ext.registry.base import Adapter, AttackListing\n"
        "from robust_ext.attacks import CallableAttack\n"
        "class Stranger(Adapter):\n"
        "    name = 'stranger'\n"
        "    def list_attacks(self):\n"
        "        return [AttackListing(name='Nothing')]\n"
        "    def build_attack(self, attack, settings, *, name):\n"
        "        return CallableAttack(lambda model, x, y: x, name=name)\n"
        "    def adapt_attack(self, attack, *, name=None):\n"
        "        return None\n"
        "    def adapt_model(self, model):\n"
        "        return None\n"
        "ADAPTER = " + ("3\n" if broken else "Stranger()\n")
    )
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[robust_ext.adapters]\nstranger = stranger:ADAPTER\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import robust_ext; print(robust_ext.as_attack('stranger:Nothing(a=1)'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if broken:
        assert "entry point 'stranger'" in done.stderr
    else:
        assert done.stdout.strip() == "CallableAttack(stranger:Nothing(a=1))", done.stderr
