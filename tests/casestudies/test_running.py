"""The run of case studies, on one that takes seconds: a network behind rounding, with and without BPDA."""

import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import ClassVar

import pytest
from torch import nn

from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.casestudies import CaseStudy, Measurement, Published, Recipe, api, training
from robust_ext.casestudies.networks import Training, small_features
from robust_ext.reports import report_page, report_text
from tests.run_folders import records_of


class Quantised(CaseStudy):
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
def test_weights_of_other_data_are_not_used(quantised, tmp_path):
    def weights(images):
        api.run_case_studies(["rounded"], samples=4, images=images, out=tmp_path / str(images) / "x")
        return (tmp_path / str(images) / "x" / "rounded" / "weights.safetensors").read_bytes()

    kept = weights(300)
    assert weights(200) != kept
    study, folder = Quantised(), tmp_path / "300" / "x" / "rounded"
    data = training.load_case_data("digits", root=None, samples=4, images=200, seed=0)
    training.trained_defense(study, data, seed=0, folder=folder)
    assert (folder / "weights.safetensors").read_bytes() != kept
