"""The tutorials and the how-tos run: their assertions hold what their text claims, and what is shown is printed."""

import re
import runpy
from itertools import pairwise

import pytest
import torch
import typer.main

from robust_ext.cli import app as cli
from tests.test_readme import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[0-9]*.py"))
HOWTO = {page.stem: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "howto").glob("*.md"))}
BLOCK = re.compile(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.DOTALL)
RUN = [name for name, text in HOWTO.items() if BLOCK.search(text)]


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(script, tmp_path, monkeypatch, capsys):
    """From an empty folder, with warnings as errors; each ends with a figure."""
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    pyplot.close("all")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as absent:
            pytest.skip(str(absent))
    assert capsys.readouterr().out
    figure = pyplot.figure(max(pyplot.get_fignums()))
    assert any(axes.has_data() for axes in figure.axes)
    # Text that leaves the figure, or axes that collapse, are warnings here.
    figure.savefig(tmp_path / "figure.png")
    pyplot.close("all")


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_each_is_a_notebook(script):
    """It begins with a title, every cell of code is preceded by text, and something in it can fail."""
    text = script.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # ")
    kinds = [line.startswith("# %% [markdown]") for line in text.splitlines() if line.startswith("# %%")]
    assert kinds[-1]
    assert all(first or second for first, second in pairwise(kinds))
    assert "\nassert " in text


@pytest.mark.parametrize("name", RUN)
def test_the_lines_of_a_how_to_run(name, tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": name}
    for code, shown in BLOCK.findall(HOWTO[name]):
        exec(compile(code, f"{name}.md", "exec"), names)  # noqa: S102 - our own pages
        assert capsys.readouterr().out.startswith(shown)
    if name == "pytest":
        names["test_my_attack"](request.getfixturevalue("attack_test"))
    if name == "attack_for_a_detector":
        aware, blind = (attack["score"] for attack in names["result"].content["attacks"])
        assert aware > blind


def test_every_how_to_is_in_the_table_and_its_commands_have_options_that_exist():
    assert set(re.findall(r"\((\w+)\.md\)", HOWTO["README"])) == {*HOWTO} - {"README"}
    assert {*RUN} >= {"logits_in_a_dict", "inconclusive", "attack_for_a_detector", "resume", "add_an_attack", "compare"}
    commands = typer.main.get_command(cli.app).commands
    for text in HOWTO.values():
        lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
        for name, rest in re.findall(r"robust-ext ([a-z-]+)((?:[^\n\\]|\\\n)*)", lines):
            known = {option for one in commands[name].params for option in one.opts}
            assert {*re.findall(r"(?<= )--[a-z-]+", rest)} <= known, f"robust-ext {name}{rest}"
