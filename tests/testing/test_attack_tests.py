"""Unit tests for attacks: the function, what the plugin makes of it in pytest, and attacks of the libraries."""

import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

import _robust_ext_pytestplugin as plugin
import robust_ext
from robust_ext.core.errors import OutOfTimeError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.context import RunContext, run_context
from robust_ext.testing import assert_attack_passes
from robust_ext.testing.networks import small_batch, small_network

pytest_plugins = ["pytester"]

LINF = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
SHORT = {"inner_points": 20, "planted_candidates": 1, "depths": (1,), "random_inner": 20, "random_corners": 20}
SHORT |= {"seed": 1}
STRONG = "robust_ext:APGD(steps=10)"
# What a test module of a user begins with.
BEGINNING = f"""
import pytest
from robust_ext import ThreatModel
from robust_ext.testing import assert_attack_passes
from robust_ext.testing.networks import small_batch, small_network
STRONG, LINF, SHORT = {STRONG!r}, ThreatModel(norm="linf", epsilon=0.1), {SHORT}
def WEAK(model, x, y):
    return x
@pytest.fixture
def given():
    return small_network((1, 5, 5), 3), small_batch(40, (1, 5, 5))
"""


@pytest.fixture(autouse=True)
def _as_outside_of_a_session(monkeypatch):
    """The verdicts here are none of the suite's."""
    monkeypatch.setattr(plugin, "_running", [])


@pytest.fixture
def given():
    return small_network((1, 5, 5), 3), small_batch(40, (1, 5, 5))


@pytest.fixture
def session(pytester, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")

    def run(code, *arguments, ini=""):
        pytester.makeini(f"[pytest]\nfilterwarnings = error\n{ini}")
        pytester.makepyfile(test_mine=BEGINNING + code)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", "--strict-markers", *arguments)

    return run


@pytest.fixture
def failure(given):
    def run(attack, threat_model=LINF, **settings):
        with pytest.raises(AssertionError) as caught:
            assert_attack_passes(given[0], attack, given[1], threat_model, **{**SHORT, **settings})
        return caught.value

    return run


def test_a_failure_is_the_table_and_the_diagnosis(failure):
    attack = "robust_ext:ObjectivePGD(steps=2, step_size=0.001)"
    error = failure(attack)
    assert str(error).startswith(f"failed: {attack}, test score 0.00 of 8, R-ASR ")
    for part in ("verdict", "Verdict: FAILED.", "1. [high] ", "The path is too short", "Remedy: ", "attack = "):
        assert part in str(error)
    assert len(str(error).splitlines()) < 50
    assert (error.result.verdict, error.result.score) == ("failed", 0)


def test_an_endless_attack_ends_in_time_and_what_was_done_counts(failure):
    calls = []

    def attack(model, x, y):
        calls.append(len(x))
        while len(calls) > 2:
            model(x)
        return x

    text = str(failure(attack, batch_size=1, canaries=0, sequential=False, budget=1.0))
    assert calls[:3] == [1, 1, 1]
    assert "test score 0.00 of 2," in text
    assert "The time was over before the attack was compared with others." in text


def test_time_that_is_over_before_the_first_sample_leaves_no_verdict(given, failure):
    text = str(failure(STRONG, budget=1e-6))
    for part in ("inconclusive: ", "nothing decided", "over after 0 of 40 samples."):
        assert part in text
    # Other evaluations are no result then.
    with run_context(RunContext(deadline=time.monotonic())), pytest.raises(OutOfTimeError):
        robust_ext.robust_accuracy(given[0], STRONG, given[1], given[0](given[1]).argmax(1), LINF)


def test_a_session_states_its_verdicts(session, pytester):
    done = session(
        """
def test_strong(given):
    assert assert_attack_passes(given[0], STRONG, given[1], LINF, **SHORT).score == 1

@pytest.mark.attack_test(samples=8, **SHORT)
class TestMarked:
    @pytest.mark.attack_test(inconclusive="pass")
    def test_closest(self, attack_test, given):
        result = attack_test(given[0], STRONG, given[1], LINF)
        assert (result.verdict, len(result.records)) == ("inconclusive", 8)

    def test_weak(self, attack_test, given):
        attack_test(given[0], WEAK, given[1], LINF)

def test_train_mode(given):
    assert_attack_passes(given[0].train(), STRONG, given[1], LINF, **SHORT)

def test_other():
    pass
""",
        "--junit-xml=report.xml",
    )
    done.assert_outcomes(passed=3, failed=2)
    done.stdout.fnmatch_lines(
        [
            "E * AssertionError: failed: *WEAK, test score 0.00 of 8, *",
            "E *Verdict: FAILED. *",
            "E *1. [[]high[]] *",
            "test_mine.py:*: AssertionError",
            "E *ModelError: *eval*",
            "* attack tests *",
            "test_mine.py::TestMarked::test_closest: inconclusive: robust_ext:APGD(steps=10), test score 1.00 of 8, *",
            "test_mine.py::TestMarked::test_weak: failed: *",
            "test_mine.py::test_strong: passed: robust_ext:APGD(steps=10), test score 1.00 of 32, R-ASR 0.*, * s",
            "Verdicts: 1 passed, 1 inconclusive, 1 failed.",
        ]
    )
    # No frame of this project, whether an attack fails or something is wrong.
    done.stdout.no_fnmatch_line("*attack_tests.py*")
    done.stdout.no_fnmatch_line("*evaluations/*")
    assert '<property name="attack_test" value="passed: ' in (pytester.path / "report.xml").read_text()


@pytest.mark.parametrize(
    ("ini", "option", "outcome"),
    [
        ("", (), "failed"),
        ("robust_ext_inconclusive = skip", ("--robust-ext-inconclusive=pass",), "passed"),
        ("robust_ext_budget = 1e-6\nrobust_ext_inconclusive = skip", (), "skipped"),
        ("robust_ext_budget = 1e-6", ("--robust-ext-budget=60", "--robust-ext-inconclusive=skip"), "skipped"),
    ],
)
def test_inconclusive_fails_unless_it_is_said_otherwise(ini, option, outcome, session):
    code = "def test_few(given): assert_attack_passes(given[0], STRONG, given[1][:4], LINF, **SHORT)"
    done = session(code, "-rs", *option, ini=ini)
    done.assert_outcomes(**{outcome: 1})
    decided = "nothing decided" if ini.startswith("robust_ext_budget") and len(option) < 2 else "test score 1.00 of 4"
    done.stdout.fnmatch_lines([f"*: inconclusive: *{decided}*", "Verdicts: 1 inconclusive."])


@pytest.mark.exhaustive
def test_processes_of_xdist_send_their_verdicts(pytester):
    code = "\ndef test_it(given, n): assert_attack_passes(given[0], [WEAK, STRONG][n], given[1], LINF, **SHORT)"
    pytester.makepyfile(test_mine=f"{BEGINNING}\n@pytest.mark.parametrize('n', [0, 1]){code}")
    done = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2", "--robust-ext-inconclusive=skip")
    lines = ["test_mine.py::test_it[[]0]: failed: *", "test_mine.py::test_it[[]1]: passed: *"]
    done.stdout.fnmatch_lines([*lines, "Verdicts: 1 passed, 1 failed."])


PAGE = Path(__file__).parents[2] / "docs" / "unit_tests_for_attacks.md"
THREATS = {"linf": LINF, "l2": robust_ext.ThreatModel(norm="l2", epsilon=0.5)}
# An attack, a norm, and why it fails; None where it passes.
CASES = [
    ("foolbox:LinfPGD(steps=40)", "linf", None),
    ("foolbox:DDNAttack(steps=100)", "l2", None),
    ("foolbox:LinfRepeatedAdditiveUniformNoiseAttack", "linf", "0.00 of 8"),
    ("foolbox:L2PGD(steps=40)", "l2", "The path is too short"),
    ("foolbox:L2FMNAttack(steps=100)", "l2", "0.00 of 8"),
    ("art:FastGradientMethod", "linf", None),
    ("art:SquareAttack(max_iter=100)", "linf", "finds less than an attack with gradients"),
    ("art:DeepFool", "l2", "It attacks the model's predicted labels instead of the given ones"),
]


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.attack_test(depths=(1,))
@pytest.mark.parametrize(("attack", "norm", "why"), CASES)
def test_attacks_of_the_libraries(attack_test, attack, norm, why):
    pytest.importorskip(attack.partition(":")[0])
    digits = load_dataset("digits")
    failure = nullcontext() if why is None else pytest.raises(AssertionError, match=r"\s+".join(why.split()))
    with failure:
        attack_test(digits_network(), attack, digits.take(digits.choose(64, seed=0))[0], THREATS[norm])


@pytest.mark.exhaustive
def test_a_project_of_its_own_is_red_with_a_diagnosis_and_green(tmp_path):
    """The module of the page, and what a library of attacks adds to it."""
    pytest.importorskip("foolbox")
    (tmp_path / "tests").mkdir()
    # Foolbox imports a deprecated module of SciPy.
    filters = '["error", "ignore:Please import:DeprecationWarning"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.pytest.ini_options]\nfilterwarnings = {filters}\n")
    code = PAGE.read_text(encoding="utf-8")
    first, second = re.findall(r"```python\n(import foolbox\n.*?|@pytest.mark.attack_test.*?)```", code, re.DOTALL)

    def run(code):
        (tmp_path / "tests" / "test_attacks.py").write_text(code)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=500)

    done = run(first)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Verdicts: 1 passed, 1 failed." in done.stdout
    for words in ("[high] ", "The path is too short", "Remedy: Take larger steps", "test_tiny_steps"):
        assert words in done.stdout
    done = run(first.partition("def test_pgd")[0] + second)
    assert "2 passed, 1 xfailed" in done.stdout, done.stdout
