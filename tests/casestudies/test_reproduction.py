"""Tables and figures of the papers: all are listed, and those that run are put beside the papers' numbers."""

import json
import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm as normal

from robust_ext import load_result
from robust_ext.casestudies import mead_tables
from robust_ext.casestudies.mead_tables import published
from robust_ext.casestudies.reproduction import PAPERS, items, reproduce
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.evaluations.mead.suites import load_suite
from tests.run_folders import records_of

PAGE = (Path(__file__).parents[2] / "docs" / "theory" / "papers.md").read_text(encoding="utf-8")


def test_every_table_and_figure_is_an_item():
    names = {paper: [one.name for one in items() if one.paper == paper] for paper in PAPERS}
    counts = {"binarization": 5, "mead": 17, "linear-region": 13, "test-time": 6}
    assert {paper: len(set(several)) for paper, several in names.items()} == counts
    assert len(items()) == sum(counts.values())
    assert all(one.where in PAGE and (one.runs or "`" in one.where or "*" in one.where) for one in items())
    with pytest.raises(InvalidArgumentError, match=re.escape("`python benchmarks/linear_region_tables.py`")):
        reproduce("linear-region", "Table 1")
    for paper, item in (("mead", "table 16"), ("meed", "table 1"), ("binarization", "figure")):
        with pytest.raises(InvalidArgumentError, match="expected one of"):
            reproduce(paper, item)


@pytest.mark.exhaustive
def test_figures_of_a_case_study_are_beside_those_of_the_paper(tmp_path):
    """Scores and accuracies are those that the records on disk add up to, and figure 4 reuses the run of figure 2."""
    given = {"samples": 8, "only": ["k_winners"], "out": tmp_path}
    scores = reproduce("binarization", "figure 2", **given)
    records = records_of(tmp_path / "runs" / "k_winners")
    accuracies = reproduce("binarization", "Figure  4", tolerance=0.3, **given)
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
    assert [(row["paper"], row["ours"]) for row in rows] == [("0.524", robust[0]), ("0.180", robust[1])]
    assert [row["difference"] for row in rows] == pytest.approx([robust[0] - 0.524, robust[1] - 0.1799])
    assert [row["agrees"] for row in rows] == [abs(row["difference"]) <= 0.3 for row in rows]
    assert "8 test images, 1 of 13 defenses" in str(accuracies)


# The paper's own average of FS in l1 on MNIST is 79.8.
ODD = {("mnist", "l1", "fs auroc"): 0.7834}


def test_the_mead_papers_averages_are_those_of_its_rows():
    """Tables 1 and 2, of all attacks, follow from tables 5 to 9 and 11 to 15; the rows are those of our collections."""
    for data in ("cifar10", "mnist"):
        arms = sorted({(arm.norm or "none", arm.group) for arm in load_suite(f"paper-{data}")})
        assert all((data, group, "all") in published() for _, group in arms)
        for norm, groups in groupby(arms, key=lambda pair: pair[0]):
            rows = [published()[data, group, "all"] for _, group in groups]
            for name, average in published()[data, norm, "all"].items():
                mean = np.mean([row[name] for row in rows if name in row])
                assert mean == pytest.approx(ODD.get((data, norm, name), average), abs=1e-3), (data, norm, name)


@pytest.mark.exhaustive
def test_mead_tables_of_a_run(tmp_path):
    """One run of the attacks for all tables; what is shown follows from its arms and its detectors."""
    attack = 'attack = "robust_ext:ObjectivePGD(steps=10, step_size=0.05)"\nnorm = "linf"'
    rest = 'epsilons = [0.25, 0.5]\nobjectives = ["ace", "gini"]'
    (tmp_path / "short.toml").write_text(f"[[arms]]\n{attack}\n{rest}\n")
    given = {"samples": 8, "suite": str(tmp_path / "short.toml"), "out": tmp_path / "out"}
    counts, detector = reproduce("mead", "table 10", **given), reproduce("mead", "table 11", **given)
    (saved,) = (tmp_path / "out" / "runs").rglob("result.json")
    content = json.loads(saved.read_text())
    for row, group in zip(counts.rows(), ("linf 0.25", "linf 0.5"), strict=True):
        arms = [arm["successes"] / 8 for arm in content["arms"] if arm["group"] == group]
        assert len(arms) == 2
        assert (row["name"], row["ours"]) == (group, pytest.approx(np.mean(arms)))
    assert [row["paper"] for row in counts.rows()] == [f"{7.41 / 12:.3f}", f"{8.85 / 12:.3f}"]
    known, entry = content["detectors"]
    assert (known["name"], entry["name"]) == ("fs", "nss")
    whole = [row["auroc"] for row in entry["results"] if row["objective"] is row["algorithm"] is None]
    assert [row["ours"] for row in detector.rows() if row["quantity"] == "AUROC"] == whole
    assert [row["paper"] for row in detector.rows()] == ["0.922", "0.096", "0.915", "0.096"]


@pytest.mark.exhaustive
def test_figure_1_of_mead(monkeypatch):
    """An optimal classifier decides by the sum of the inputs, N(2, 2); 1.2 shifts it by 2.4."""
    monkeypatch.setattr(mead_tables, "_SETS", 4)
    found = {row["name"]: row["ours"] for row in reproduce("mead", "figure 1").rows()}
    assert found["classifier attacked by ace"] == pytest.approx(normal.cdf(-0.4 / np.sqrt(2)), abs=0.06)
    trained = ("both, tested on gini", "gini, tested on gini", "gini, tested on ace")
    both, same, other = (found[f"detector trained on {one}"] for one in trained)
    assert same > both > other + 0.05
