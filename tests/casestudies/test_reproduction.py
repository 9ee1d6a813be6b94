"""Tables and figures of the papers: all are listed, and those that run are put beside the papers' numbers."""

import json
import re
from pathlib import Path

import pytest

from robust_ext import load_result
from robust_ext.casestudies import hardness
from robust_ext.casestudies.reproduction import PAPERS, items, reproduce
from robust_ext.core.errors import InvalidArgumentError
from tests.run_folders import records_of, runs_of

PAGE = (Path(__file__).parents[2] / "docs" / "theory" / "papers.md").read_text(encoding="utf-8")


def test_every_table_and_figure_is_an_item():
    counts = {paper: [one.name for one in items() if one.paper == paper] for paper in PAPERS}
    assert {paper: len(names) for paper, names in counts.items()} == {
        "binarization": 5,
        "mead": 17,
        "linear-region": 13,
        "test-time": 6,
    }
    assert all(len(set(names)) == len(names) for names in counts.values())
    assert all(one.where in PAGE and (one.runs or "`" in one.where or "*" in one.where) for one in items())


def test_what_is_not_run_says_where_it_is():
    with pytest.raises(InvalidArgumentError, match=re.escape("`python benchmarks/linear_region_tables.py`")):
        reproduce("linear-region", "Table 1")
    for paper, item in (("mead", "table 16"), ("meed", "table 1"), ("binarization", "figure")):
        with pytest.raises(InvalidArgumentError, match="expected one of"):
            reproduce(paper, item)


@pytest.mark.exhaustive
def test_figures_of_a_case_study_are_beside_those_of_the_paper(tmp_path):
    """Scores and accuracies are those that the records on disk add up to, and figure 4 reuses the run of figure 2."""
    scores = reproduce("binarization", "figure 2", samples=8, only=["k_winners"], out=tmp_path)
    records = records_of(tmp_path / "runs" / "k_winners")
    accuracies = reproduce("binarization", "Figure  4", samples=8, only=["k_winners"], tolerance=0.3, out=tmp_path)
    assert records_of(tmp_path / "runs" / "k_winners") == records
    assert load_result(tmp_path) == accuracies
    solved, robust = [], []
    for recipe in ("weak", "right"):
        outcomes = [one["attacks"][recipe]["outcome"] for one in records[recipe]]
        planted = [one for one in outcomes if one != "not_planted"]
        solved.append(planted.count("found") / len(planted))
        kept = [one["outcome"] != "found" for one in records[f"{recipe}-accuracy"]]
        right = [recipe == "weak" or one["correct"] for one in records[f"{recipe}-accuracy"]]
        robust.append(sum(map(min, kept, right)) / 8)
    shown = [(row["paper"], row["ours"], row["agrees"]) for row in scores.rows()]
    assert shown == [("< .95", solved[0], solved[0] < 0.95), (">= .95", solved[1], solved[1] >= 0.95)]
    rows = accuracies.rows()
    assert [row["ours"] for row in rows] == robust
    assert [row["paper"] for row in rows] == ["0.524", "0.180"]
    assert [row["difference"] for row in rows] == pytest.approx([robust[0] - 0.524, robust[1] - 0.1799])
    assert [row["agrees"] for row in rows] == [abs(row["difference"]) <= 0.3 for row in rows]
    assert "8 test images, 1 of 13 defenses" in str(accuracies)


@pytest.mark.exhaustive
def test_appendix_b_has_its_points(tmp_path, monkeypatch):
    """The trapdoor's at .01: 999 uniform points, one in a corner, as many random points as queries."""
    monkeypatch.setattr(hardness, "_OWN", {"trapdoor": hardness._OWN["trapdoor"]})
    result = reproduce("binarization", "appendix B", samples=2, out=tmp_path)
    runs = runs_of(tmp_path / "runs" / "trapdoor")
    settings = {place.split("/")[0]: saved.run["settings"] for place, saved in runs.items()}
    assert {place: one["epsilon"] for place, one in settings.items()} == {
        "all": 0.1,
        "own": 0.01,
        "own-weak": 0.01,
        "own-right": 0.01,
    }
    points = {"inner": "uniform", "inner_points": 999, "planted_candidates": 1, "boundary_points": 1, "gap": 0.05}
    assert all(points.items() <= one.items() for one in settings.values())
    for place, expected in (("own", 400), ("own-weak", 100)):
        records = runs[f"{place}/regular"].records()
        assert {one["attacks"]["weak"]["trace"]["queries"] for one in records if one["separable"]} == {100}
        assert settings[place]["random_inner"] + settings[place]["random_corners"] == expected
    rows = [(row["name"], row["quantity"], row["paper"]) for row in result.rows()]
    own = "999 inner, 1 planted, epsilon 0.01"
    assert len(rows) == 8
    assert (f"Trapdoor, weak recipe, {own}", "test score", "< .95") in rows
    assert (f"Trapdoor, right recipe, {own}", "R-ASR, as many points as queries", None) in rows


@pytest.mark.exhaustive
def test_a_defense_is_trained_and_its_gain_compared(tmp_path):
    """The paper's table 2: 52.2 of SODEF under transfer, 53.9 of its static model."""
    result = reproduce("test-time", "table 2", samples=8, out=tmp_path)
    (row,) = result.rows()
    run = json.loads((tmp_path / "runs" / "sodef" / "result.json").read_text())
    (alone,) = [one["alone"] for one in run["categories"] if one["category"] == "transfer"]
    assert row["ours"] == pytest.approx(alone - run["static"]["worst_case"]["robust_accuracy"])
    assert row["difference"] == pytest.approx(row["ours"] + 0.017)
    assert row["agrees"] == (abs(row["difference"]) <= 0.1)
    assert load_result(tmp_path) == result
