"""The tables of the MEAD paper: its numbers as they were copied, and ours beside them."""

import json
from itertools import groupby

import numpy as np
import pytest
from scipy.stats import norm as normal

from robust_ext.casestudies import mead_tables
from robust_ext.casestudies.mead_tables import published
from robust_ext.casestudies.reproduction import reproduce
from robust_ext.evaluations.mead.suites import load_suite

SUITE = """
[[arms]]
attack = "robust_ext:ObjectivePGD(steps=10, step_size=0.05)"
norm = "linf"
epsilons = [0.25, 0.5]
objectives = ["ace", "gini"]
"""
# The paper's own average of FS in l1 on MNIST is 79.8.
ODD = {("mnist", "l1", "fs auroc"): 0.7834}


def test_the_papers_averages_are_those_of_its_rows():
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
def test_tables_of_a_run(tmp_path):
    """One run of the attacks for all tables; what is shown follows from its arms and its detectors."""
    (tmp_path / "short.toml").write_text(SUITE)
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
    assert [row["ours"] for row in detector.rows() if row["quantity"] == "AUROC"] == [
        row["auroc"] for row in entry["results"] if row["objective"] is row["algorithm"] is None
    ]
    assert [row["paper"] for row in detector.rows()] == ["0.922", "0.096", "0.915", "0.096"]


@pytest.mark.exhaustive
def test_figure_1(monkeypatch):
    """An optimal classifier decides by the sum of the inputs, N(2, 2); 1.2 shifts it by 2.4."""
    monkeypatch.setattr(mead_tables, "_SETS", 4)
    found = {row["name"]: row["ours"] for row in reproduce("mead", "figure 1").rows()}
    assert found["classifier attacked by ace"] == pytest.approx(normal.cdf(-0.4 / np.sqrt(2)), abs=0.06)
    both, same, other = (
        found[f"detector trained on {one}"]
        for one in ("both, tested on gini", "gini, tested on gini", "gini, tested on ace")
    )
    assert same > both > other + 0.05
