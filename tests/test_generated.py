"""What is made from declarations of settings is current, and type checkers know the keywords."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SNIPPET = """
from typing_extensions import Unpack
from robust_ext.evaluations.binarization.options import BinarizationOptions

def test(**options: Unpack[BinarizationOptions]) -> None: ...

test(kappa=0.99, boundary="surface", batch_size="auto", fold=False)
test(kapa=0.99)
test(inner_points="many")
test(boundary="edge")
"""
ERRORS = {
    8: 'Unexpected keyword argument "kapa"',
    9: 'incompatible type "str"; expected "int"',
    10: "expected \"Literal['auto', 'corners', 'surface']\"",
}


def test_generated_files_are_current():
    generated = runpy.run_path(str(ROOT / ".ci" / "generate_settings.py"))["generate"]()
    assert len(generated) == 5
    for path, text in generated.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python .ci/generate_settings.py"


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
