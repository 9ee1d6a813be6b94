"""Attacks of Foolbox and ART under unit tests, and a user's own project."""

import re
import resource
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

PAGE = Path(__file__).parents[2] / "docs" / "unit_tests_for_attacks.md"
THREATS = {"linf": ThreatModel(norm="linf", epsilon=0.1), "l2": ThreatModel(norm="l2", epsilon=0.5)}
# An attack, a norm, and why it fails; None where it passes.
CASES = [
    ("foolbox:LinfPGD(steps=40)", "linf", None),
    ("foolbox:LinfDeepFoolAttack", "linf", None),
    ("foolbox:LInfFMNAttack(steps=50)", "linf", None),
    ("foolbox:DDNAttack(steps=100)", "l2", None),
    ("foolbox:LinfRepeatedAdditiveUniformNoiseAttack", "linf", "0.00 of 8"),
    ("foolbox:L2PGD(steps=40)", "l2", "The path is too short"),
    ("foolbox:L2FMNAttack(steps=100)", "l2", "0.00 of 8"),
    ("art:FastGradientMethod", "linf", None),
    ("art:ProjectedGradientDescentPyTorch(eps_step=0.01, max_iter=40)", "linf", None),
    ("art:AutoProjectedGradientDescent(eps_step=0.02, max_iter=20, nb_random_init=1)", "linf", None),
    ("art:SquareAttack(max_iter=100)", "linf", "finds less than an attack with gradients"),
    ("art:DeepFool", "l2", "It attacks the model's predicted labels instead of the given ones"),
]
QUICK = ("art:FastGradientMethod", "foolbox:LinfRepeatedAdditiveUniformNoiseAttack")


@pytest.fixture(scope="module")
def inputs():
    digits = load_dataset("digits")
    return digits.take(digits.choose(64, seed=0))[0]


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.attack_test(depths=(1,))
@pytest.mark.parametrize(
    ("attack", "norm", "why"),
    [pytest.param(*one, marks=() if one[0] in QUICK else pytest.mark.exhaustive) for one in CASES],
)
def test_attack(attack_test, inputs, attack, norm, why):
    pytest.importorskip(attack.partition(":")[0])
    failure = nullcontext() if why is None else pytest.raises(AssertionError, match=r"\s+".join(why.split()))
    with failure:
        attack_test(digits_network(), attack, inputs, THREATS[norm])


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
