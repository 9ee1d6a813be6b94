"""Tables and figures of the papers: all are listed, and those that run are put beside the papers' numbers."""

import json
import re
from pathlib import Path

import pytest

from robust_ext import load_result
from robust_ext.casestudies import reproduction
from robust_ext.casestudies.reproduction import PAPERS, items, reproduce
from robust_ext.casestudies.result import CaseStudyResult
from robust_ext.core.errors import InvalidArgumentError
from tests.reports.results import make_case_studies

PAGE = (Path(__file__).parents[2] / "docs" / "theory" / "papers.md").read_text(encoding="utf-8")


def test_every_table_and_figure_is_an_item():
    counts = {paper: [one.name for one in items() if one.paper == paper] for paper in PAPERS}
    assert {paper: len(names) for paper, names in counts.items()} == {
        "binarization": 4,
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


@pytest.mark.parametrize(
    ("item", "figures"),
    [
        ("figure 2", [("< 0.95", 0.375, None, True), (None, 0.984375, None, None)]),
        ("figure 4", [("0.300", 0.84375, 0.54375, False), ("0.000", 0.1, 0.1, True)]),
    ],
)
def test_figures_of_case_studies_are_beside_those_of_the_paper(monkeypatch, item, figures):
    content = make_case_studies("Thermometer")
    for recipe, score in zip(content["studies"][0]["recipes"].values(), (0.375, 0.984375), strict=True):
        recipe["score"] = score
        recipe["robust_accuracy"] = {**recipe["robust_accuracy"], "claimed": 0.84375}
    content["studies"] = content["studies"][:1]
    monkeypatch.setattr(reproduction, "run_case_studies", lambda **given: CaseStudyResult(content))
    result = reproduce("binarization", item, tolerance=0.1)
    found = [(row["paper"], row["ours"], row["difference"], row["agrees"]) for row in result.rows()]
    assert found == [(paper, ours, pytest.approx(more), agrees) for paper, ours, more, agrees in figures]
    assert "Thermometer, weak recipe" in str(result)


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
