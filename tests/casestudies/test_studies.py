"""Case studies on the digits: mechanisms and recipes, the run of studies, and the papers' tables and figures."""

import json
import re
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal
from torch import nn

from robust_ext import binarization_test, casestudies, load_result, robust_accuracy
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.casestudies import Measurement, Published, Recipe, Trained, api, load_case_study, mead_tables, training
from robust_ext.casestudies.mead_tables import published
from robust_ext.casestudies.networks import Training, small_features
from robust_ext.casestudies.reproduction import PAPERS, items, reproduce
from robust_ext.core.errors import InconsistentModelError, InvalidArgumentError
from robust_ext.datasets import load_dataset
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.reports import report_page, report_text
from tests.run_folders import records_of

# Samples for the mechanism, for both recipes, the highest R-ASR of the right one, and the finding on the weak one.
STUDIES = {
    "adversarial_interpolation": (200, 128, 64, 0.2, None),
    "feature_scattering": (200, 64, 64, 0.5, None),  # Uniform inner points leave it above .75 in the paper.
    "k_winners": (200, 32, 32, 1.0, "wrong_gradient"),
    "mmc": (32, 32, 32, 1.0, None),
    "pcl": (200, 32, 64, 1.0, "saturated_loss"),
    "thermometer": (200, 32, 32, 1.0, None),
    "ecoc": (200, 8, 32, 0.2, None),
    "empir": (200, 32, 64, 0.2, None),
    # It misses a few of 64 problems at some seeds, too many for a verdict on fewer; a failure shows on fewer samples.
    "mixup_inference": (64, 16, 64, 1.0, None),
    "odds": (200, 8, 12, 1.0, None),
    "ml_loo": (200, 12, 48, 0.2, None),
    "trapdoor": (200, 48, 64, 0.2, None),
}
QUICK = ("k_winners", "mmc", "pcl")


def data(split):
    images = load_dataset("digits", split=split)
    return images.take(images.choose(len(images), seed=0))


@cache
def on_digits(name):
    """The study, the defense, trained once a session, with all test images, and its detector."""
    study, (inputs, labels) = load_case_study(name), data("test")
    given = {"inputs": inputs, "labels": labels, "threat_model": study.threat_model("digits"), "seed": 0}
    case = Trained(module=study.trained(*data("train")), **given)
    return study, case, study.detector(case.module, *data("train"), seed=0)


def measured(name, samples):
    study, case, _ = on_digits(name)
    return study.measure(Trained(**{**vars(case), "inputs": case.inputs[:samples], "labels": case.labels[:samples]}))


def judged(name, kind, samples, **options):
    """The binarization test of the weak or the right recipe, at depth 1, as deeper problems cost the most."""
    study, case, detector = on_digits(name)
    attacks, given = {kind: getattr(study, kind).attack}, {**study.settings, "depths": (1.0,), **options}
    if detector is not None:
        given |= {"detector": detector, "detector_data": case.inputs[200:]}
    inputs, parts = case.inputs[:samples], study.parts(case.module)
    content = binarization_test(parts, attacks, inputs, case.threat_model, **given).content
    return {**content["attacks"][0], "findings": content["findings"]}


@pytest.mark.parametrize("name", QUICK)
def test_mechanism(name):
    found = measured(name, STUDIES[name][0])
    assert found.present, found.values
    assert found.values.get("errors corrected by true labels", 0) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STUDIES)
def test_the_recipe_of_the_authors_fails_and_the_right_one_passes(name):
    if name not in QUICK:
        # Here, as another process would have to train the defense again.
        test_mechanism(name)
    _, weak_samples, right_samples, limit, code = STUDIES[name]
    # At seed 0 the authors' recipe for adversarial interpolation solves 61 of 64 on some machines, at the threshold.
    seed = {"mixup_inference": 1, "adversarial_interpolation": 4}.get(name, 0)
    weak, right = judged(name, "weak", weak_samples, seed=seed), judged(name, "right", right_samples, seed=seed)
    assert weak["verdict"] == "failed"
    assert code is None or weak["findings"][0]["code"] == code
    # Odds: half of the samples can be planted in, in the inverted test. Mixup inference: a rate of .95. Both: too few.
    assert right["verdict"] == "passed" or (name in ("odds", "mixup_inference") and right["verdict"] == "inconclusive")
    tests = right.get("tests") or {"one": right}
    assert all(part["random_score"] <= limit for part in tests.values())
    if name == "ecoc":
        assert weak["score"] <= 0.2
    if name == "empir":
        assert (weak["canaries"]["repaired"] >= 2, right["canaries"]["repaired"]) == (True, 0)
    if name in ("odds", "ml_loo", "trapdoor"):
        assert right["score"] >= 0.95
    if name == "adversarial_interpolation":
        # The single step that it is trained against misses what is there.
        _, case, _ = on_digits(name)
        fgsm, inputs = "robust_ext:ObjectivePGD(algorithm='fgsm')", case.inputs[:64]
        assert binarization_test(case.module, fgsm, inputs, case.threat_model, depths=(1,)).verdict == "failed"


@pytest.mark.exhaustive
def test_curriculum_training_is_refused_in_train_mode_and_attacks_pass_in_eval_mode():
    found = measured("curriculum", 32)
    assert found.present, found.values
    study, case, _ = on_digits("curriculum")
    module, inputs, labels, weak, right = case.module, case.inputs[:32], case.labels[:32], study.weak, study.right
    linf = case.threat_model
    assert weak.train_mode
    with pytest.raises(InconsistentModelError, match="is in train mode") as refused:
        binarization_test(module.train(), weak.attack, inputs, linf)
    assert refused.value.kind == "train_mode"
    with pytest.raises(InconsistentModelError, match="is in train mode"):
        robust_accuracy(module, weak.attack, inputs, labels, linf)
    # In eval mode the steps of the authors find planted points, too.
    for recipe in (weak, right):
        result = binarization_test(module.eval(), recipe.attack, inputs, linf)
        assert result.verdict == "passed", str(result)


# The run of case studies, on one that takes seconds: a network behind rounding, with and without BPDA.


class Quantised(casestudies.CaseStudy):
    """Inputs of 16 levels."""

    title = "Rounded inputs"
    source = "This file"
    published = Published(claimed=0.9, true=0.0, weak_score="< 0.95")
    causes = ("zero_gradient",)

    def build(self, shape, classes):
        return nn.Sequential(Rounding(), small_features(shape, 32), nn.Linear(32, classes))

    def measure(self, case):
        share = float((case.gradients() == 0).float().mean())
        return Measurement(values={"zero gradients": share}, present=share == 1.0, words="All gradients are zero.")

    weak = Recipe(attack="robust_ext:APGD(steps=5)", words="No BPDA.")
    right = Recipe(attack=AdaptedAttack(attack=APGD(steps=20), bpda="0"), words="It is passed straight through.")
    training = Training(epochs=(3, 3), batch_size=64, learning_rate=(3e-3, 3e-3))
    settings: ClassVar = {"inner_points": 99}


class Rounding(nn.Module):
    def forward(self, x):
        return (x * 15).round() / 15


@pytest.fixture
def quantised(monkeypatch):
    monkeypatch.setitem(api.CASE_STUDIES, "rounded", "Quantised")
    monkeypatch.setattr(api, "load_case_study", lambda name: Quantised())


@pytest.mark.exhaustive
def test_weak_recipe_flagged_and_right_one_passed(quantised, tmp_path):
    result = api.run_case_studies(["rounded"], samples=30, images=600, out=tmp_path)
    study = result.studies["rounded"]
    weak, right = study["recipes"]["weak"], study["recipes"]["right"]
    assert study["mechanism"]["present"]
    assert (weak["verdict"], weak["flagged_by"], right["score"] >= 0.95) == ("failed", "score", True)
    assert weak["robust_accuracy"]["claimed"] > right["robust_accuracy"]["verified"] + 0.2
    assert "1 of 1 recipe of the authors flagged" in str(result)
    kept = json.loads((tmp_path / "result.json").read_text())
    assert report_text(kept) == str(result)
    assert "Rounded inputs" in report_page(kept)
    # Elsewhere it is the same.
    (tmp_path / "pooled" / "rounded").mkdir(parents=True)
    shutil.copy(tmp_path / "rounded" / "weights.safetensors", tmp_path / "pooled" / "rounded")
    forked = partial(ProcessPoolExecutor, 2, mp_context=get_context("fork"))
    api.run_case_studies(["rounded"], samples=30, images=600, out=tmp_path / "pooled", executor=forked, device="cpu")
    here = records_of(tmp_path / "rounded")
    assert len(here) == 4
    assert records_of(tmp_path / "pooled" / "rounded") == here
    # Again, nothing is trained or attacked: the same result from what was kept, but for the time it took.
    before = {file: file.read_bytes() for file in tmp_path.rglob("records.jsonl")}
    again = api.run_case_studies(["rounded"], samples=30, images=600, out=tmp_path)
    assert len(before) == 8
    assert {file: file.read_bytes() for file in before} == before
    assert again.studies["rounded"]["recipes"]["weak"]["score"] == weak["score"]


@pytest.mark.exhaustive
def test_weights_of_other_data_are_not_used(tmp_path):
    def weights(images):
        given = training.load_case_data("digits", root=None, samples=4, images=images, seed=0)
        return next(training.trained_defense(Quantised(), given, seed=0, folder=tmp_path).parameters())

    first, other, again = weights(300), weights(200), weights(200)
    assert not torch.equal(first, other)
    assert torch.equal(other, again)


# Tables and figures of the papers: all are listed, and those that run are put beside the papers' numbers.

PAGE = (Path(__file__).parents[2] / "docs" / "theory" / "papers.md").read_text(encoding="utf-8")


def test_every_table_and_figure_is_an_item():
    names = {paper: [one.name for one in items() if one.paper == paper] for paper in PAPERS}
    counts = {"binarization": 5, "mead": 17, "linear-region": 13, "test-time": 6}
    assert {paper: len(set(several)) for paper, several in names.items()} == counts
    assert len(items()) == sum(counts.values())
    assert all(one.where in PAGE and (one.runs or "`" in one.where or "*" in one.where) for one in items())
    with pytest.raises(InvalidArgumentError, match=re.escape("`python benchmarks/linear_region_tables.py`")):
        reproduce("linear-region", "Table 1")


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
