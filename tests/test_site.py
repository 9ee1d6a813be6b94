"""The documentation site: what it is made of holds together, and it builds where its tools are installed."""

import importlib
import inspect
import json
import pkgutil
import re
import shutil
import subprocess

import pytest

import robust_ext
from tests.test_readme import ROOT, text_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
# What newcomers type, the page that has to come first, and what it has to hold.
QUESTIONS = {
    "install on Python 3.12": ("howto/install.html", "python3.12"),
    "my model returns logits in a dict": ("howto/logits_in_a_dict.html", "LogitsOf"),
    "R-ASR is high, what now": ("howto/high_r_asr.html", "--calibrate"),
    "resume a killed run": ("howto/resume.html", "it resumes where it stopped"),
    "run on Slurm": ("howto/slurm.html", "--nworkers"),
    "what does inconclusive mean": ("howto/inconclusive.html", "too few samples"),
    "compare two runs": ("howto/compare.html", "gained and lost"),
}


@pytest.fixture(scope="module")
def website():
    """The modules that make the pages."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / ".ci" / "website"))
        yield {name: importlib.import_module(name) for name in ("docstrings", "reference", "stage", "tutorials")}


@pytest.fixture(scope="module")
def staged(website, tmp_path_factory):
    to = tmp_path_factory.mktemp("pages")
    website["stage"].stage(ROOT, to)
    return to


def without_code(page):
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ +(.*)$", without_code(page), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one).lower() for one in headings)
    return {re.sub(r"[^\w\- ]", "", one).strip().replace(" ", "-") for one in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_on_github(page):
    text = without_code(page)
    for target, _, anchor in re.findall(r"\]\((?!https?:|mailto:)([^)#\s]*)(#([^)\s]*))?\)", text):
        # Examples of links, as of a badge, stand in code.
        if f"`[{target}" in text or target == "badge.svg":
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


def test_every_page_is_in_the_navigation_and_files_that_pages_link_to_are_shown(staged):
    listed = set(re.findall(r"[\w/]+\.md\b", text_of("mkdocs.yml").split("\nnav:")[1]))
    pages = {path.relative_to(staged).as_posix() for path in staged.rglob("*.md")}
    assert {page for page in pages if not page.startswith(("causes/", "files/", "evidence/"))} == listed
    shown = (staged / "files" / "examples" / "nearest_images.py.md").read_text()
    assert "distances after given amounts of work" in shown
    assert "](files/examples/foolbox_user.py.md)" in (staged / "index.md").read_text()


def test_every_public_name_is_in_the_reference(staged):
    """Public by what the packages hold when they are imported; the pages are made from their text."""
    shown = set(re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in staged.glob("reference/*.md")), re.M))
    here = {path.rpartition(".")[2] for path in shown}
    walked = pkgutil.walk_packages(robust_ext.__path__, "robust_ext.")
    # The packages that hand names on, without those of other libraries.
    faces = [one.name for one in walked if one.ispkg and "._" not in one.name and ".adapters" not in one.name]
    for face in map(importlib.import_module, ["robust_ext", *faces]):
        for name, value in vars(face).items():
            if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("robust_ext."):
                assert name.startswith("_") or name in here, f"{face.__name__}.{name}"
    assert {"robust_ext.binarization_test", "robust_ext.fit_detector", "robust_ext.attacks.apgd.APGD"} <= shown
    for path in shown - {"robust_ext.testing.assert_attack_passes"}:
        module, _, name = path.rpartition(".")
        assert ".adapters." in path or hasattr(importlib.import_module(module), name), path


@pytest.mark.exhaustive
def test_the_site_builds_and_its_search_has_the_right_page_first():
    """Warnings are errors there, and every link is checked; node runs the site's own search script as browsers do."""
    if shutil.which("node") is None:
        pytest.skip("the search of the site is run by node")
    for package in ("mkdocs", "mkdocstrings", "material", "latex2mathml"):
        pytest.importorskip(package, reason='the site needs pip install -e ".[docs]"')
    done = subprocess.run([ROOT / ".ci" / "site", "--no-outputs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checked, broken = map(int, re.findall(r"^(\d+) links checked, (\d+) broken$", done.stdout, re.M)[0])
    assert checked > 1000
    assert broken == 0
    command = ["node", ROOT / ".ci" / "website" / "search.js", ROOT / "build" / "site", *QUESTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for (question, (page, wanted)), found in zip(QUESTIONS.items(), json.loads(done.stdout), strict=True):
        assert found[0] == page, question
        assert wanted in (ROOT / "build" / "site" / page).read_text(encoding="utf-8")
