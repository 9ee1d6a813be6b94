"""What is made from declarations of settings is current, and type checkers know the keywords."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from robust_ext.core.files import read_toml

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


@pytest.mark.parametrize(
    ("script", "files", "needed"),
    [("generate_settings", 5, ()), ("generate_papers", 1, ()), ("generate_host_stubs", 2, ("foolbox", "art"))],
)
def test_generated_files_are_current(script, files, needed):
    for package in needed:
        pytest.importorskip(package)
    generated = runpy.run_path(str(ROOT / ".ci" / f"{script}.py"))["generate"]()
    assert len(generated) == files
    for path, text in generated.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python .ci/{script}.py"


@pytest.mark.exhaustive
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


def test_what_is_installed_is_all_there_is():
    """Packages and their data, which an editable install has whatever pyproject.toml lists."""
    installed = read_toml(ROOT / "pyproject.toml", name="pyproject.toml", kind="project", see="")["tool"]["setuptools"]
    folders = {"robust_ext": ROOT / "robust_ext", "robust_ext.adapters": ROOT / "adapters"}
    packages, data = set(), set()
    for name, folder in folders.items():
        for file in folder.rglob("*"):
            inside = [name, *file.relative_to(folder).parts]
            if file.name == "__init__.py":
                packages.add(".".join(inside[:-1]))
            elif file.is_file() and file.suffix not in (".py", ".pyc"):
                data.add(file)
    assert packages == {*installed["packages"]}
    listed = {
        file
        for package, patterns in installed["package-data"].items()
        for pattern in patterns
        for file in _folder(package, folders).glob(pattern)
    }
    assert listed == data


def _folder(package, folders):
    top = max((name for name in folders if package.startswith(name)), key=len)
    return folders[top].joinpath(*package.removeprefix(top).split(".")[1:])
