"""MEAD end to end: against attacks and areas computed by hand, interrupted, resumed, extended, and misused."""

import json
import os
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from robust_ext import Arm, MeadResult, ThreatModel, mead
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import (
    AttackRefusedError,
    InvalidArgumentError,
    ModelError,
    RobustExtWarning,
    RunFolderError,
)
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.run import candidates_name
from robust_ext.engine.run_folder import SavedRun
from robust_ext.evaluations import scored_runs
from robust_ext.evaluations.scored_runs import score_points
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
    points = inputs.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(network(points), labels), points)
    return (inputs + epsilon * gradient.sign()).clamp(0, 1)


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
    """What a result holds beside times and what an attack object says of itself."""
    text = json.dumps({key: value for key, value in result.content.items() if key not in ("time", "versions")})
    found = json.loads(text)
    for part in (*found["detectors"], *found["arms"]):
        part.pop("seconds")
    return found


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


@pytest.mark.parametrize("raises_at", [1, 2, 4])
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
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["kind"] == "mead"
    assert saved == json.loads(json.dumps({"format": 2, **resumed.content}))
    assert "<html" in (tmp_path / "report.html").read_text()


def test_detectors_and_arms_are_added_without_running_anything_again(subject, tmp_path):
    first, second, detectors = Counting("first"), Counting("second"), {"unsure": Unsure, "spread": spread}
    run(subject, {"unsure": Unsure}, [first], out=tmp_path)
    both = run(subject, detectors, [second, first], out=tmp_path)
    assert (first.calls.call_count, second.calls.call_count) == (1, 1)
    assert content(both) == content(run(subject, detectors, [second, first], out=elsewhere(tmp_path)))


@pytest.fixture
def scored(monkeypatch):
    """How many points were scored, call by call."""
    sizes = []

    def counted(detectors, points, **keywords):
        sizes.append(len(points))
        return score_points(detectors, points, **keywords)

    monkeypatch.setattr(scored_runs, "score_points", counted)
    return sizes


def test_scores_survive_with_their_blocks(subject, tmp_path, scored):
    detectors = {"unsure": Unsure, "spread": spread}
    with pytest.raises(Exception, match="stopped"):
        run(subject, detectors, [Counting(raises_at=4)], batch_size=10, out=tmp_path)
    assert scored == [10, 10, 10]
    result = run(subject, detectors, [Counting()], batch_size=10, out=tmp_path)
    # The last block, and the four of the clean inputs.
    assert scored == [10] * 8
    whole = run(subject, detectors, [Counting()], batch_size=10, out=elsewhere(tmp_path))
    assert content(result) == content(whole)


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


def test_candidates_are_kept_and_are_what_was_judged(subject, tmp_path):
    network, inputs, labels, _ = subject
    run(subject, {"unsure": Unsure}, [Counting()], out=tmp_path, batch_size=16)
    (folder,) = (path for path in (tmp_path / "attacks").iterdir() if path.name.startswith("counting"))
    saved = SavedRun(folder)
    kept = [saved.load(candidates_name(timing["block"]))["candidates"] for timing in saved.timings()]
    assert [len(part) for part in kept] == [16, 16, 8]
    by_hand = torch.cat([fgsm(network, x, y, EPSILON) for x, y in zip(inputs.split(16), labels.split(16), strict=True)])
    assert torch.equal(torch.from_numpy(np.concatenate(kept)), by_hand.detach())


def test_filtered_naturals(subject):
    """Samples that are misclassified as they are count for nothing, whatever is done to them."""
    network, inputs, labels, held_out = subject
    wrong = labels.clone()
    wrong[:15] = (labels[:15] + 1) % 10
    beside, arms = {"unsure": Unsure}, [Counting()]
    filtered = run((network, inputs, wrong, held_out), beside, arms, naturals="filtered")
    rest = run((network, inputs[15:], labels[15:], held_out), beside, arms, naturals="filtered")
    for name in ("auroc", "positives", "naturals", "fpr_at_95_tpr", "curve"):
        assert filtered.detectors["unsure"]["results"][0][name] == rest.detectors["unsure"]["results"][0][name]
    kept = run((network, inputs, wrong, held_out), beside, arms)
    assert kept.detectors["unsure"]["results"][0]["naturals"] == 40


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
    assert "differentiable=False" in refused["reason"]
    assert result.arms["Selective linf 0.2, knowing unsure"]["adaptive_to"] == "unsure"
    # Groups of blind arms do not count it.
    assert {row["arms"] for row in unsure["results"]} == {1}


def test_combined_detectors(subject):
    """Each is scored as if it were a detector of its own; one that all members agree with is as good as they are."""
    arms = [Counting()]
    methods = ("mean", "max", "mixture")
    result = run(subject, {"a": Unsure, "b": Unsure}, arms, combine=methods)
    alone = result.detectors["a"]["results"][0]["auroc"]
    for method in methods:
        entry = result.detectors[f"{method} of a, b"]
        assert entry["combines"] == ["a", "b"]
        assert entry["results"][0]["auroc"] == pytest.approx(alone, abs=1e-12)
    with pytest.raises(InvalidArgumentError, match="detector_data"):
        run(subject, {"a": Unsure, "b": Unsure}, arms, combine=("mean",), detector_data=None)
    with pytest.raises(InvalidArgumentError, match="at least two"):
        run(subject, {"a": Unsure}, arms, combine=("mean",))


def test_an_attack_that_never_succeeds(subject):
    network, inputs, _, held_out = subject
    with torch.no_grad():
        labels = network(inputs).argmax(1)
    result = run((network, inputs, labels, held_out), {"unsure": Unsure}, [Counting(scale=0.0)])
    entry = result.detectors["unsure"]["results"][0]
    assert (entry["auroc"], entry["positives"], entry["attribution"], entry["curve"]) == (None, 0, None, None)
    assert result.auroc("unsure") is None
    assert "unsure" in str(result)


def test_one_sample_and_other_bounds():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(6, 3)).eval()
    x = torch.rand(1, 1, 2, 3) * 4 - 2
    with torch.no_grad():
        labels = network(x).argmax(1)
    wide = ThreatModel(norm="l2", epsilon=3.0, bounds=(-2.0, 2.0))
    result = mead(network, "robust_ext:ObjectivePGD(steps=5)", x, labels, wide, detectors=spread, resamples=20)
    assert list(result.detectors) == ["spread"]
    assert result.content["samples"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attacks": []}, "at least one arm"),
        ({"attacks": "nothing"}, "suite"),
        ({"naturals": "dropped"}, "naturals"),
        ({"combine": "mean"}, "combine"),
        ({"combine": ("median",)}, "combine"),
        ({"detectors": [Unsure, Unsure]}, "several called Unsure"),
        ({"detectors": []}, "at least one detector"),
    ],
)
def test_what_is_refused(subject, change, words):
    network, inputs, labels, _ = subject
    keywords = {"attacks": ARM, "detectors": {"unsure": Unsure}, **change}
    with pytest.raises(InvalidArgumentError, match=words):
        mead(network, inputs=inputs, labels=labels, threat_model=LINF, **keywords)
    with pytest.raises(ModelError, match="train mode"):
        mead(digits_network().train(), ARM, inputs, labels, LINF, detectors=Unsure)


def test_an_arm_that_makes_no_sense_is_refused_before_any_work(subject):
    first = Counting()
    with pytest.raises(AttackRefusedError, match="linf"):
        run(subject, {"unsure": Unsure}, [first, "foolbox:L2PGD(steps=2)"])
    first.calls.assert_not_called()


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
    assert isinstance(result, MeadResult)
    assert list(tmp_path.iterdir()) == []
