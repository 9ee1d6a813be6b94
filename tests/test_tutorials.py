"""The tutorials, run as scripts: their assertions hold what their text claims, and each ends with a figure."""

import runpy
from itertools import pairwise
from pathlib import Path

import pytest
import torch

TUTORIALS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("[0-9]*.py"))
# Those that take a few seconds at most.
QUICK = ()


@pytest.fixture
def pyplot():
    """matplotlib without a display; figures are closed afterwards."""
    pytest.importorskip("matplotlib").use("agg")
    from matplotlib import pyplot

    pyplot.close("all")
    yield pyplot
    pyplot.close("all")


@pytest.mark.filterwarnings("ignore:Please import `gaussian_filter`:DeprecationWarning")
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.exhaustive) for path in TUTORIALS],
    ids=lambda path: path.stem,
)
def test_tutorial(script, pyplot, tmp_path, monkeypatch, capsys):
    """From an empty folder, with warnings as errors."""
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


@pytest.mark.parametrize("script", TUTORIALS, ids=lambda path: path.stem)
def test_each_is_a_notebook(script):
    """It begins with a title, every cell of code is preceded by text, and something in it can fail."""
    text = script.read_text(encoding="utf-8")
    assert text.startswith("# %% [markdown]\n# # ")
    kinds = [line.startswith("# %% [markdown]") for line in text.splitlines() if line.startswith("# %%")]
    assert kinds[-1]
    assert all(first or second for first, second in pairwise(kinds))
    assert "\nassert " in text
