"""Attacks of Foolbox and ART under unit tests, as their own libraries would hold them, and a user's own project."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

PAGE = Path(__file__).parents[2] / "docs" / "unit_tests_for_attacks.md"
THREATS = {"linf": ThreatModel(norm="linf", epsilon=0.1), "l2": ThreatModel(norm="l2", epsilon=0.5)}
# Library, attack, norm, settings, and why it fails; None where it passes.
CASES = [
    ("foolbox", "FGSM", "linf", {"random_start": False}, None),
    ("foolbox", "LinfPGD", "linf", {"steps": 40}, None),
    ("foolbox", "LinfBasicIterativeAttack", "linf", {}, None),
    ("foolbox", "LinfDeepFoolAttack", "linf", {}, None),
    ("foolbox", "LInfFMNAttack", "linf", {"steps": 50}, None),
    ("foolbox", "DDNAttack", "l2", {"steps": 100}, None),
    ("foolbox", "LinfRepeatedAdditiveUniformNoiseAttack", "linf", {}, "0.00 of 8"),
    ("foolbox", "L2PGD", "l2", {"steps": 40}, "The path is too short"),
    ("foolbox", "L2FMNAttack", "l2", {"steps": 100}, "0.00 of 8"),
    ("foolbox", "L2FMNAttack", "l2", {"steps": 100, "max_stepsize": 0.5}, None),
    ("art", "FastGradientMethod", "linf", {}, None),
    ("art", "ProjectedGradientDescentPyTorch", "linf", {"eps_step": 0.01, "max_iter": 40}, None),
    ("art", "BasicIterativeMethod", "linf", {"eps_step": 0.01, "max_iter": 40}, None),
    ("art", "AutoProjectedGradientDescent", "linf", {"eps_step": 0.02, "max_iter": 20, "nb_random_init": 1}, None),
    ("art", "SquareAttack", "linf", {"max_iter": 100}, "finds less than an attack with gradients"),
    ("art", "DeepFool", "l2", {}, "It attacks the model's predicted labels instead of the given ones"),
]
QUICK = ("FastGradientMethod", "LinfRepeatedAdditiveUniformNoiseAttack")


def case(library, name, *rest):
    marks = () if name in QUICK else pytest.mark.exhaustive
    return pytest.param(library, name, *rest, marks=marks, id=f"{library}-{name}")


@pytest.fixture(scope="module")
def inputs():
    digits = load_dataset("digits")
    return digits.take(digits.choose(64, seed=0))[0]


def of_foolbox(name, settings, threat_model):
    foolbox = pytest.importorskip("foolbox")
    model = foolbox.PyTorchModel(digits_network(), bounds=threat_model.bounds, device="cpu")
    return model, getattr(foolbox.attacks, name)(**settings)


def of_art(name, settings, threat_model):
    pytest.importorskip("robust_ext.adapters.art.estimators", reason="ART is not installed")
    from robust_ext.adapters.art.library import art

    classifier = art.estimators.classification.PyTorchClassifier(
        digits_network(), loss=nn.CrossEntropyLoss(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1)
    )
    made = getattr(art.attacks.evasion, name)
    known = {"eps": threat_model.epsilon, "verbose": False}
    return classifier, made(classifier, **{key: known[key] for key in known if key in made.attack_params}, **settings)


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.attack_test(depths=(1,))
@pytest.mark.parametrize(("library", "name", "norm", "settings", "why"), [case(*one) for one in CASES])
def test_attack(attack_test, inputs, library, name, norm, settings, why):
    model, attack = {"foolbox": of_foolbox, "art": of_art}[library](name, settings, THREATS[norm])
    if why is None:
        attack_test(model, attack, inputs, THREATS[norm])
    else:
        with pytest.raises(AssertionError) as caught:
            attack_test(model, attack, inputs, THREATS[norm])
        assert why in " ".join(str(caught.value).split())


def page_block(beginning):
    (found,) = re.findall(rf"```python\n({beginning}.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return found


@pytest.mark.exhaustive
def test_a_project_of_its_own_is_red_with_a_diagnosis_and_green(tmp_path):
    """The module of the page in less CPU time than 20 s, and what a library of attacks adds to it."""
    pytest.importorskip("foolbox")
    (tmp_path / "tests").mkdir()
    # Foolbox imports a deprecated module of SciPy.
    filters = '["error", "ignore:Please import:DeprecationWarning"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nfilterwarnings = {filters}\n")
    first, second = page_block("import foolbox\n"), page_block("@pytest.mark.attack_test")

    def run(code):
        (tmp_path / "tests" / "test_attacks.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    done, seconds = run(first)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Verdicts: 1 passed, 1 failed." in done.stdout
    for words in ("[high] ", "The path is too short", "Remedy: Take larger steps", "test_tiny_steps"):
        assert words in done.stdout
    assert seconds < 20
    done, _ = run(first.partition("def test_pgd")[0] + second)
    assert "2 passed, 1 xfailed" in done.stdout, done.stdout
