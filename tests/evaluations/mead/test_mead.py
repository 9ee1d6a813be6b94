"""MEAD end to end: against attacks and areas computed by hand, interrupted, resumed, extended, and misused."""

import json
import os
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from robust_ext import Arm, ThreatModel, mead
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import RobustExtWarning, RunFolderError
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.run_folder import SavedRun
from tests.evaluations.small import timeless
from tests.evaluations.steps import gradient
from tests.evaluations.subjects import Unsure, spread

EPSILON = 0.2
LINF = ThreatModel(norm="linf", epsilon=EPSILON)
ARM = "robust_ext:ObjectivePGD(steps=2)"


class Counting(Attack):
    """FGSM by hand, which counts its calls, and raises at one of them."""

    traits = AttackTraits(batching="full")

    def __init__(self, name="counting", *, raises_at=None, scale=1.0):
        self.name, self.scale = name, scale
        # None of its settings.
        self.calls = Mock(
            side_effect=None if raises_at is None else [None] * (raises_at - 1) + [RuntimeError("stopped")]
        )

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.calls()
        return fgsm(target.module, inputs, labels, self.scale * threat_model.epsilon)


def fgsm(network, inputs, labels, epsilon):
    return (inputs + epsilon * gradient(network, inputs, labels).sign()).clamp(0, 1)


@pytest.fixture(scope="module")
def subject():
    digits = load_dataset("digits")
    inputs, labels = digits.take(range(40))
    return digits_network(), inputs, labels, digits.take(range(100, 200))[0]


def run(subject, detectors, arms, **keywords):
    network, inputs, labels, held_out = subject
    keywords = {"detectors": detectors, "resamples": 0, "detector_data": held_out, **keywords}
    return mead(network, arms, inputs, labels, LINF, **keywords)


def content(result):
    """What a result holds beside times."""
    return timeless({key: value for key, value in json.loads(json.dumps(result.content)).items() if key != "versions"})


def elsewhere(folder):
    """Another run folder: digests in settings are those of results with one."""
    return folder.with_name(f"{folder.name}_elsewhere")


def test_against_hand_written_attacks_and_scikit_learn(subject):
    """Two FGSMs by hand, worst case by hand, areas by scikit-learn."""
    network, inputs, labels, _ = subject
    attacks = {"a": Counting("strong"), "b": Counting("weak", scale=0.6)}
    arms = [Arm(attack=attack, norm="linf", epsilon=EPSILON, objective=name) for name, attack in attacks.items()]
    result = run(subject, {"unsure": Unsure}, arms)
    detector = Unsure(network)
    with torch.no_grad():
        natural = detector.score(inputs).double().numpy()
    scores, success = [], []
    for scale in (1.0, 0.6):
        points = fgsm(network, inputs, labels, scale * EPSILON).detach()
        with torch.no_grad():
            success.append((network(points).argmax(1) != labels).numpy())
            scores.append(detector.score(points).double().numpy())
    rows = {row["objective"]: row for row in result.detectors["unsure"]["results"]}
    for objective, chosen in {None: [0, 1], "a": [0], "b": [1]}.items():
        entry = rows[objective]
        worst = np.where(np.array(success)[chosen], np.array(scores)[chosen], np.inf).min(0)
        positives = worst[worst < np.inf]
        truth = np.r_[np.zeros(len(natural)), np.ones(len(positives))]
        assert entry["auroc"] == pytest.approx(roc_auc_score(truth, np.r_[natural, positives]))
        found = (entry["positives"], entry["coverage"], entry["arms"])
        assert found == (len(positives), len(positives) / len(inputs), len(chosen))
        assert entry["successes_per_sample"] == np.array(success)[chosen].sum() / len(inputs)
    assert [result.arms[f"{name} linf 0.2"]["successes"] for name in ("strong", "weak")] == [s.sum() for s in success]
    with torch.no_grad():
        assert result.content["clean_accuracy"] == float((network(inputs).argmax(1) == labels).double().mean())
    assert result.auroc("unsure") == result.detectors["unsure"]["results"][0]["auroc"]


@pytest.mark.parametrize("raises_at", [1, 4])
def test_interrupted_and_resumed(subject, tmp_path, raises_at):
    """Stopped at any block, it goes on there, and ends with the same result."""

    def arms(**keywords):
        return [Arm(attack=ARM, norm="linf", epsilon=EPSILON, label="PGD"), Counting(**keywords)]

    whole = run(subject, {"unsure": Unsure}, arms(), batch_size=10, out=elsewhere(tmp_path))
    with pytest.raises(Exception, match="stopped"):
        run(subject, {"unsure": Unsure}, arms(raises_at=raises_at), batch_size=10, out=tmp_path)
    rest = arms()
    resumed = run(subject, {"unsure": Unsure}, rest, batch_size=10, out=tmp_path)
    assert rest[1].calls.call_count == 4 - (raises_at - 1)
    assert content(resumed) == content(whole)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(
        json.dumps({"format": 2, **resumed.content})
    )


def test_detectors_and_arms_are_added_without_running_anything_again(subject, tmp_path):
    first, second, detectors = Counting("first"), Counting("second"), {"unsure": Unsure, "spread": spread}
    run(subject, {"unsure": Unsure}, [first], out=tmp_path)
    both = run(subject, detectors, [second, first], out=tmp_path)
    assert (first.calls.call_count, second.calls.call_count) == (1, 1)
    assert content(both) == content(run(subject, detectors, [second, first], out=elsewhere(tmp_path)))


class Noisy(Unsure):
    """One whose scores are random."""

    random = True

    def score_of(self, observed):
        return super().score_of(observed) + torch.rand(len(observed.inputs))


def test_random_scores_are_the_same_whatever_detectors_there_are_and_whenever_they_come(subject, tmp_path):
    found = []
    for before in ({}, {"unsure": Unsure}):
        for out in (None, tmp_path / str(len(before))):
            if out is not None and before:
                run(subject, before, [Counting()], batch_size=10, out=out)
            both = run(subject, {**before, "noisy": Noisy}, [Counting()], batch_size=10, out=out)
            found.append(both.content["detectors"][-1]["results"][0]["auroc"])
    assert len(set(found)) == 1


def signed_spread(x):
    return float(os.environ["SIGN_OF_SPREAD"]) * spread(x)


def test_scores_of_a_detector_that_behaves_differently_are_not_taken_over(subject, tmp_path, monkeypatch):
    """Whatever makes it do so; its code is the same."""
    # Without a threshold, which would differ too.
    evaluated = partial(run, subject, {"spread": signed_spread}, [Counting()], detector_data=None)
    monkeypatch.setenv("SIGN_OF_SPREAD", "1")
    evaluated(out=tmp_path)
    monkeypatch.setenv("SIGN_OF_SPREAD", "-1")
    assert content(evaluated(out=tmp_path)) == content(evaluated(out=elsewhere(tmp_path)))


def test_another_seed_or_other_samples_are_refused(subject, tmp_path):
    arms = [Counting()]
    run(subject, {"unsure": Unsure}, arms, out=tmp_path)
    with pytest.raises(RunFolderError, match="seed"):
        run(subject, {"unsure": Unsure}, arms, out=tmp_path, seed=1)
    network, inputs, labels, held_out = subject
    with pytest.raises(RunFolderError, match="inputs"):
        run((network, inputs[:20], labels[:20], held_out), {"unsure": Unsure}, arms, out=tmp_path)


def test_minimum_norm_arms_are_judged_by_distance(subject, tmp_path):
    deepfool = "foolbox:L2DeepFoolAttack(steps=20, overshoot=0.02)"
    epsilons = (0.2, 0.5, 1.0)
    arms = [Arm(attack=deepfool, norm="l2", epsilon=epsilon, label="DF") for epsilon in epsilons]
    arms.append(Arm(attack=deepfool, norm="l2", label="DF"))
    result = run(subject, {"unsure": Unsure}, arms, out=tmp_path)
    (folder,) = (path for path in (tmp_path / "attacks").iterdir() if path.name.startswith("DF"))
    records = SavedRun(folder).records()
    distances = np.array([record["distance"] for record in records if record["outcome"] == "found"])
    counts = [result.arms[f"DF l2 {epsilon:g}"]["successes"] for epsilon in epsilons]
    assert counts == [int((distances <= epsilon).sum()) for epsilon in epsilons]
    assert result.arms["DF"]["successes"] == len(distances) > counts[0]
    assert result.arms["DF l2 0.2"]["outcomes"]["beyond_epsilon"] == len(distances) - counts[0]


def test_arms_that_know_the_detector(subject):
    """They are reported beside the others, scored by every detector, and refused where there are no gradients."""

    class Blind(Unsure):
        differentiable = False

    selective = "robust_ext:SelectivePGD(steps=100)"
    arms = [Counting(), Arm(attack=selective, norm="linf", epsilon=EPSILON, label="Selective")]
    result = run(subject, {"unsure": Unsure, "blind": Blind}, arms)
    unsure, blind = result.detectors["unsure"], result.detectors["blind"]
    assert [(row["scenario"], row["arms"]) for row in unsure["white_box"]] == [("white-box", 1), ("all", 2)]
    aware, both = unsure["white_box"]
    # The attack lowers the score below that of FGSM, which knows nothing of it.
    assert aware["auroc"] < unsure["results"][0]["auroc"] - 0.15
    assert both["auroc"] <= unsure["results"][0]["auroc"]
    assert blind["white_box"] == []
    (refused,) = result.content["refused"]
    assert (refused["arms"], refused["detector"]) == (["Selective linf 0.2"], "blind")
    assert result.arms["Selective linf 0.2, knowing unsure"]["adaptive_to"] == "unsure"
    # Groups of blind arms do not count it.
    assert {row["arms"] for row in unsure["results"]} == {1}


def test_an_attack_that_never_succeeds(subject):
    network, inputs, _, held_out = subject
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    result = run((network, inputs, labels, held_out), {"unsure": Unsure}, [Counting(scale=0.0)])
    entry = result.detectors["unsure"]["results"][0]
    assert (entry["auroc"], entry["positives"], entry["attribution"], entry["curve"]) == (None, 0, None, None)
    assert result.auroc("unsure") is None
    # Arms bring budgets of their own: an epsilon that none of them has is no fault.
    attack, linf = Counting(scale=0.0), ThreatModel(norm="linf", epsilon=1)
    arms = [Arm(attack=attack, norm="linf", epsilon=EPSILON)]
    found = mead(network, arms, inputs, labels, linf, detectors={"unsure": Unsure}, resamples=0, detector_data=held_out)
    assert "threat_scale" not in {one["code"] for one in found.content["findings"]}


def test_scores_that_are_no_numbers_are_counted_and_reported(subject, tmp_path, monkeypatch):
    """Without a folder nothing is written, too."""
    monkeypatch.chdir(tmp_path)

    def broken(x):
        return torch.where(torch.arange(len(x)) < 3, torch.nan, spread(x))

    with pytest.warns(RobustExtWarning, match="NaN"):
        result = run(subject, {"broken": broken}, [Counting()], detector_data=None)
    entry = result.detectors["broken"]["results"][0]
    assert entry["unscored"] >= 3
    assert any("NaN" in words for words in result.content["warnings"])
    assert list(tmp_path.iterdir()) == []
