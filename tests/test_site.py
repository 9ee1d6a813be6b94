"""The documentation site: what it is made of holds together, and it builds where its tools are installed."""

import importlib
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import robust_ext

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
# What newcomers type, the page that has to come first, and what it has to hold.
QUESTIONS = {
    "install on Python 3.12": ("howto/install.html", "python3.12"),
    "my model returns logits in a dict": ("howto/logits_in_a_dict.html", "LogitsOf"),
    "R-ASR is high, what now": ("howto/high_r_asr.html", "--calibrate"),
    "which attack for a detector": ("howto/attack_for_a_detector.html", "OrthogonalPGD"),
    "resume a killed run": ("howto/resume.html", "it resumes where it stopped"),
    "run on Slurm": ("howto/slurm.html", "--nworkers"),
    "what does inconclusive mean": ("howto/inconclusive.html", "too few samples"),
    "add my attack": ("howto/add_an_attack.html", "sign_steps"),
    "use it in pytest": ("howto/pytest.html", "attack_test"),
    "compare two runs": ("howto/compare.html", "gained and lost"),
}
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def website():
    """The modules that make the pages."""
    folder = str(ROOT / ".ci" / "website")
    sys.path.insert(0, folder)
    try:
        yield {name: importlib.import_module(name) for name in ("docstrings", "reference", "stage", "tutorials")}
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def staged(website, tmp_path_factory):
    to = tmp_path_factory.mktemp("pages")
    website["stage"].stage(ROOT, to)
    return to


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one).lower() for one in headings)
    return {re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_on_github(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    for target, _, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(#([^)\s]*))?\)", text):
        # Examples of links, as of a badge, stand in code.
        if f"`[{target}" in text or target == "badge.svg":
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_in_the_navigation(staged):
    listed = set(re.findall(r"[\w/]+\.md\b", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:")[1]))
    pages = {path.relative_to(staged).as_posix() for path in staged.rglob("*.md")}
    assert {page for page in pages if not page.startswith(("causes/", "files/", "evidence/"))} == listed


def faces():
    """The package and those of its packages that hand names on, without those of other libraries."""
    yield robust_ext
    for module in pkgutil.walk_packages(robust_ext.__path__, "robust_ext."):
        if module.ispkg and "._" not in module.name and ".adapters" not in module.name:
            yield importlib.import_module(module.name)


def test_every_public_name_is_in_the_reference(staged):
    """Public by what the packages hold when they are imported; the pages are made from their text."""
    shown = set(re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in staged.glob("reference/*.md")), re.M))
    here = {path.rpartition(".")[2]: path for path in shown}
    missing = [
        f"{face.__name__}.{name}"
        for face in faces()
        for name, value in vars(face).items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("robust_ext.")
        and not name.startswith("_")
        and name not in here
    ]
    assert missing == []
    assert {"robust_ext.binarization_test", "robust_ext.fit_detector", "robust_ext.attacks.apgd.APGD"} <= shown
    for path in shown - {"robust_ext.testing.assert_attack_passes"}:
        module, _, name = path.rpartition(".")
        if ".adapters." not in path:
            assert hasattr(importlib.import_module(module), name), path


def test_files_that_pages_link_to_are_shown(staged):
    assert (
        "distances after given amounts of work" in (staged / "files" / "examples" / "nearest_images.py.md").read_text()
    )
    assert "](files/examples/foolbox_user.py.md)" in (staged / "index.md").read_text()


def test_sections_become_tabs(website):
    made = website["stage"].tabs("## ART\n\nWords.\n\n```python\nx = 1\n```\n\n## Foolbox\n\nOthers.\n")
    assert made == '=== "ART"\n\n    Words.\n\n    ```python\n    x = 1\n    ```\n\n=== "Foolbox"\n\n    Others.\n\n'


def test_notebooks_become_pages(website, tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text("# %% [markdown]\n# # Title\n#\n# Words.\n\n# %%\nx = 1\n")
    made = website["tutorials"].page(script, ["```text\n2\n```\n"])
    assert made.rstrip() == "# Title\n\nWords.\n\n```python\nx = 1\n```\n\n```text\n2\n```"


@pytest.mark.exhaustive
def test_notebooks_are_run_once(website, tmp_path):
    """What they print and draw is kept until they change."""
    pytest.importorskip("nbclient", reason='the site needs pip install -e ".[docs]"')
    (tmp_path / "constraints.txt").touch()
    script = tmp_path / "docs" / "tutorials" / "1.py"
    script.parent.mkdir(parents=True)
    script.write_text(
        "# %% [markdown]\n# # Title\n\n# %%\nimport matplotlib.pyplot as plt\nprint(1 + 1)\n_ = plt.plot([0, 1])\n"
    )
    made = website["tutorials"]
    assert made.kept(script, tmp_path) is None
    made.run(script, tmp_path)
    kept = made.kept(script, tmp_path)
    assert "```text\n2\n```\n\n![Figure 1](1-1.svg)" in (kept / "page.md").read_text()
    assert "<svg" in (kept / "1-1.svg").read_text()
    script.write_text("# %% [markdown]\n# # Other title\n")
    assert made.kept(script, tmp_path) is None


def test_docstrings_have_links_and_settings(website):
    code = (
        "from __future__ import annotations\n@settings_class\nclass A:\n"
        '    """See :class:`~b.B` and docs/threats.md.\n\n    Example:\n        >>> A()\n    """\n\n'
        '    steps: int = setting(default=3, help="At least :data:`LEAST`.", minimum=1)\n'
    )
    made = website["docstrings"].for_the_site(code, {"b.B": "robust_ext.B"})
    scope = {"A": None}
    exec(made, scope)  # noqa: S102
    assert inspect.signature(scope["A"]).parameters["steps"].default == 3
    assert inspect.getdoc(scope["A"]) == (
        "See [`B`][robust_ext.B] and [threats](../threats.md).\n\n"
        "Args:\n    steps: At least `LEAST`.\n\nExamples:\n    >>> A()"
    )


def search_results(*questions):
    """What the built site's own search script returns in node, which runs it as browsers do."""
    command = ["node", ROOT / ".ci" / "website" / "search.js", ROOT / "build" / "site", *questions]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(questions, json.loads(done.stdout), strict=True))


@pytest.mark.exhaustive
def test_the_site_builds_and_its_search_has_the_right_page_first():
    """Warnings are errors there, and every link is checked."""
    if shutil.which("node") is None:
        pytest.skip("the search of the site is run by node")
    for package in ("mkdocs", "mkdocstrings", "material", "latex2mathml"):
        pytest.importorskip(package, reason='the site needs pip install -e ".[docs]"')
    done = subprocess.run([ROOT / ".ci" / "site", "--no-outputs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checked, broken = map(int, re.findall(r"^(\d+) links checked, (\d+) broken$", done.stdout, re.M)[0])
    assert checked > 1000
    assert broken == 0
    first = {question: pages[0] for question, pages in search_results(*QUESTIONS).items()}
    assert first == {question: page for question, (page, _) in QUESTIONS.items()}
    for page, wanted in QUESTIONS.values():
        assert wanted in (ROOT / "build" / "site" / page).read_text(encoding="utf-8")
