"""Generated files are current, what is installed is complete, and tables and patches of the pages hold."""

import json
import runpy

import pytest

from robust_ext.core.files import read_toml
from tests.test_readme import ROOT, text_of


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


def test_what_is_installed_is_all_there_is():
    """Packages and their data, which an editable install has whatever pyproject.toml lists."""
    installed = read_toml(ROOT / "pyproject.toml", name="pyproject.toml", kind="project", see="")["tool"]["setuptools"]
    folders, data = {}, set()
    for name, folder in {"robust_ext": ROOT / "robust_ext", "robust_ext.adapters": ROOT / "adapters"}.items():
        for file in folder.rglob("*"):
            if file.name == "__init__.py":
                folders[".".join([name, *file.relative_to(folder).parts[:-1]])] = file.parent
            elif file.is_file() and file.suffix not in (".py", ".pyc"):
                data.add(file)
    assert {*folders} == {*installed["packages"]}
    patterns = [(folders[name], one) for name, several in installed["package-data"].items() for one in several]
    assert {file for folder, pattern in patterns for file in folder.glob(pattern)} == data


def test_the_tables_of_the_page_on_scaling_are_computed(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scaling, page = pytest.importorskip("scaling"), text_of("docs/scaling.md")
    assert scaling.filled(page, json.loads(text_of("docs/unit_costs.json"))) == page
    assert page.count(scaling.BEGIN) == page.count(scaling.END) == 2
