"""What is made from declarations of settings is current, and type checkers know the keywords."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPET = """
from torch import Tensor
import robust_ext as r

def user(model: object, attack: object, x: Tensor, y: Tensor, threat: r.ThreatModel) -> None:
    r.binarization_test(model, attack, x, threat, kappa=0.99, boundary="surface", batch_size="auto", fold=False)
    r.mead(model, attack, x, y, threat, detectors=None, combine=["mean"], naturals="filtered")
    r.robust_accuracy(model, attack, x, y, threat, epsilons=[0.1, 0.2])
    r.evaluate_defense("hd", attack, x, y, threat, steps=5)
    r.binarization_test(model, attack, x, threat, kapa=0.99)
    r.binarization_test(model, attack, x, threat, inner_points="many")
    r.binarization_test(model, attack, x, threat, boundary="edge")
    r.mead(model, attack, x, y, threat, detectors=None, seeds=3)
    r.robust_accuracy(model, attack, x, y, threat, epsilons=0.1)
    r.evaluate_defense("hd", attack, x, y, threat, steps=0.5)
"""
ERRORS = {
    10: 'Unexpected keyword argument "kapa"',
    11: 'incompatible type "str"; expected "int"',
    12: "expected \"Literal['auto', 'corners', 'surface']\"",
    13: 'Unexpected keyword argument "seeds"',
    14: 'incompatible type "float"; expected "Sequence[float] | None"',
    15: 'incompatible type "float"; expected "int"',
}


def test_generated_files_are_current():
    generated = runpy.run_path(str(ROOT / ".ci" / "generate_settings.py"))["generate"]()
    assert len(generated) == 5
    for path, text in generated.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python .ci/generate_settings.py"


def test_host_stubs_are_current():
    for package in ("foolbox", "art"):
        pytest.importorskip(package)
    generated = runpy.run_path(str(ROOT / ".ci" / "generate_host_stubs.py"))["generate"]()
    assert len(generated) == 2
    for path, text in generated.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python .ci/generate_host_stubs.py"


@pytest.mark.slow
def test_a_type_checker_knows_the_keywords(tmp_path):
    pytest.importorskip("mypy")
    script = tmp_path / "user.py"
    script.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", tmp_path, script]
    environment = {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    found = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error: " in line}
    assert found.keys() == ERRORS.keys(), done.stdout + done.stderr
    assert all(words in found[line] for line, words in ERRORS.items())
