"""Findings in the four evaluations: what is wrong, the layer, what to do; nothing where nothing is."""

import io
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from robust_ext import ThreatModel, binarization_test, robust_accuracy
from robust_ext.cli.models import load_model
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes import attaching
from robust_ext.evaluations.causes.attaching import Attacked, explain, find_causes
from robust_ext.evaluations.causes.finding import Finding, Remedy, ranked
from robust_ext.evaluations.causes.probes import ModelProbe
from robust_ext.registry.attack import as_attack
from robust_ext.reports import report_text
from tests.evaluations.small import call
from tests.evaluations.subjects import Unsure

ROOT = Path(__file__).parents[2]
LINF = ThreatModel(norm="linf", epsilon=0.1)
FAST = {"inner_points": 100, "random_inner": 20, "random_corners": 20, "canaries": 2, "witness_queries": 8}
SHORT = "foolbox:LinfPGD(steps=20, random_start=False)"
HEALTHY = "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)"


class Rounded(nn.Module):
    """Rounds to eighths."""

    def forward(self, x):
        return (x * 8).round() / 8


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    x = torch.tensor(data.images[1500:1512] / 16, dtype=torch.float32)[:, None]
    return x, torch.tensor(data.target[1500:1512])


@pytest.fixture(scope="module")
def rounding():
    return nn.Sequential(OrderedDict(quantise=Rounded(), network=digits_network())).eval()


def codes(result, *, low=False):
    return [one["code"] for one in result.content["findings"] if low or one["weight"] != "low"]


def evaluate(kind, model, attack, digits, out=None):
    """The result of an evaluation of an attack on a model."""
    own = {"binarization": FAST, "test_time": {"draws": 2, "repeats": 1}}.get(kind, {})
    return call(kind, model, attack, *digits, LINF, out=out, **own)


KINDS = pytest.mark.parametrize("kind", ["binarization", "robust_accuracy", "mead", "test_time"])


@KINDS
def test_a_rounding_layer_is_named_in_every_result(rounding, digits, kind):
    """With BPDA as remedy."""
    result = evaluate(kind, rounding, HEALTHY, digits)
    first = result.content["findings"][0]
    assert (first["code"], first["weight"]) == ("zero_gradient", "high")
    assert first["layer"].endswith("quantise")
    paste = first["remedies"][0]["paste"]
    assert "bpda" in paste or "straight_through" in paste
    assert all(line in report_text(result.content) for line in paste.splitlines())


@pytest.mark.exhaustive
@KINDS
def test_findings_come_from_the_run_folder_and_are_on_the_page(rounding, digits, kind, tmp_path):
    """The same from records that are there already."""
    first, again = (evaluate(kind, rounding, HEALTHY, digits, tmp_path).content["findings"] for _ in range(2))
    assert first == again
    assert "AdaptedAttack" in " ".join((tmp_path / "report.html").read_text().split())


@KINDS
def test_a_healthy_attack_has_no_findings_and_no_probe(digits, kind, monkeypatch):
    monkeypatch.setattr(attaching, "probe_model", Mock(side_effect=AssertionError))
    result = evaluate(kind, digits_network(), HEALTHY, digits)
    assert result.content["findings"] == []
    without = {key: value for key, value in result.content.items() if key != "findings"}
    assert report_text(without) == report_text(result.content), "results of earlier versions have no findings"


def test_a_failed_verdict_states_its_cause(rounding, digits):
    result = binarization_test(rounding, HEALTHY, digits[0], LINF, **FAST)
    assert result.verdict == "failed"
    assert "Most likely cause: The gradient at the input is exactly zero: quantise" in result.content["reason"]
    assert 'bpda="quantise"' in str(result)
    assert str(result).count("Most likely cause") == 1


@pytest.mark.exhaustive
def test_an_attack_that_does_not_know_the_detector_is_told_so(digits):
    """It is no fault of its path that what it found is rejected, and none of one that knows the detector."""
    attacks = [HEALTHY, "robust_ext:OrthogonalPGD(steps=60)"]
    settings = {**FAST, "detector": Unsure, "detector_data": load_dataset("digits").take(range(60))[0]}
    result = binarization_test(digits_network(), attacks, digits[0], replace(LINF, epsilon=0.15), **settings)
    blind, knowing = result.content["attacks"]
    assert (blind["verdict"], knowing["verdict"]) != ("passed", "failed")
    assert "the detector, which it is not shown. Remedy: Take an attack on classifier and detector" in blind["reason"]
    assert "does not know" not in blind["reason"], "most of what is planted it finds"
    assert "cause" not in knowing["reason"]
    assert result.content["findings"] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("attack", "exposure"),
    [
        (HEALTHY, "reject"),
        ("robust_ext:APGD(steps=20)", "reject"),
        ("robust_ext:Square(queries=500)", "reject"),
        ("robust_ext:Square(queries=500)", "classifier"),
    ],
)
def test_an_untargeted_attack_is_shown_the_detector_in_the_margin(digits, attack, exposure):
    """Not as a class, which it would take for a success."""
    settings = {**FAST, "detector": Unsure, "detector_data": load_dataset("digits").take(range(100, 200))[0]}
    given = (digits_network(), attack, digits[0], replace(LINF, epsilon=0.15))
    (entry,) = binarization_test(*given, **settings, exposure=exposure).content["attacks"]
    (proposed,) = set(re.findall(r'exposure="(\w+)"', entry["reason"]))
    (fixed,) = binarization_test(*given, **settings, exposure=proposed).content["attacks"]
    before, after = (sum(test["score"] for test in one["tests"].values()) for one in (entry, fixed))
    assert after > before


def test_robust_accuracy_warns_above_its_numbers(rounding, digits):
    result = robust_accuracy(rounding, {"PGD": HEALTHY}, *digits, LINF, epsilons=(0.05, 0.1))
    text = " ".join(str(result).split())
    assert text.index("Warning: PGD: The gradient at the input is exactly zero: quantise") < text.index("worst case")
    assert "The one attack that was run is weakened by this: robust accuracy, the worst case too" in text
    beside = robust_accuracy(rounding, {"PGD": HEALTHY, "Square": "robust_ext:Square(queries=200)"}, *digits, LINF)
    assert "Robust accuracy under PGD is an upper bound" in " ".join(str(beside).split())


def test_a_path_too_short_is_told_with_both_ways_out(digits):
    result = robust_accuracy(digits_network(), SHORT, *digits, LINF)
    text = " ".join(str(result).split())
    assert codes(result) == ["short_path"]
    assert "20 steps x 0.0333 epsilon end at 0.667 epsilon" in text
    assert "rel_stepsize 0.125; or take more steps: steps 80" in text
    assert 'attack = "foolbox:LinfPGD(steps=20, random_start=False, rel_stepsize=0.125)"' in text


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        ([], "None of the known causes applies. Next: compare the attack with others on the same samples (robust_ext"),
        ([Finding(code="no_gradient", cause="None was asked for.", attack="a")], "None of the known causes applies."),
        ([Finding(code="unmoved", cause="It stays.", attack="b")], "None of the known causes applies."),
        ([Finding(code="unmoved", cause="It stays", attack="a")], "Most likely cause: It stays."),
        (
            [
                Finding(code="train_mode", cause="It trains.", remedies=(Remedy(words="Call eval()."),)),
                Finding(code="flat_loss", cause="It is flat.", attack="a", samples=3, of=4),
            ],
            "Most likely cause: It is flat (3 of 4 samples).",
        ),
        (
            [Finding(code="train_mode", cause="It trains.", remedies=(Remedy(words="Call eval()."),))],
            "Most likely cause: It trains. Remedy: Call eval().",
        ),
    ],
)
def test_what_a_failure_is_explained_by(findings, words):
    assert explain(ranked(findings), "a").startswith(words)


def entry(outcome, distance=0.1, **trace):
    return {"outcome": outcome, "distance": distance, "trace": trace or None, "canary": None, "correct": True}


def test_budgets_of_an_attack_are_compared_and_told_apart():
    """What was found at .1 and is not at .2 is a fault; a minimum-norm attack counts at each budget by its distance."""
    found, missed = [entry("found") for _ in range(20)], [entry("not_adversarial") for _ in range(20)]

    def run(epsilon, entries):
        return Attacked(
            name="PGD",
            attack=as_attack("robust_ext:APGD()"),
            entries=dict(enumerate(entries)),
            threat_model=replace(LINF, epsilon=epsilon),
            failed=entries is missed,
            budgets={epsilon: epsilon},
        )

    probed = []
    less = find_causes([run(0.1, found), run(0.2, missed)], lambda: probed.append(1) or ModelProbe())
    assert [one.code for one in less] == ["larger_budget_less"]
    assert probed == [1]
    assert find_causes([run(0.1, missed), run(0.2, found)], ModelProbe) == []
    assert [one["outcome"] for one in run(0.05, found).within(0.05, range(20))] == ["not_adversarial"] * 20


@pytest.fixture(scope="module")
def resnet():
    """A published ResNet-20, and images of CIFAR-10 as JPEG files hold them; neither is part of the project."""
    shared = ROOT.parent / "shared"
    weights, images = shared / "models" / "cifar10_resnet20.safetensors", shared / "data" / "cifar10" / "test_jpeg.npz"
    if not weights.exists() or not images.exists():
        pytest.skip("no ResNet-20 or no CIFAR-10 on this machine")
    network = load_model(f"{ROOT / 'examples' / 'networks.py'}:resnet20", weights=str(weights)).model
    held = np.load(images)
    jpeg, offsets = held["jpeg"], held["offsets"]
    files = (io.BytesIO(jpeg[offsets[row] : offsets[row + 1]].tobytes()) for row in range(12))
    x = torch.stack([torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255 for file in files])
    return network, x, torch.from_numpy(held["labels"][:12]).long()


@pytest.mark.exhaustive
def test_the_cause_is_told_on_a_resnet(resnet):
    """Behind a rounding layer, in both evaluations, and with steps that do not reach the edge of the ball."""
    network, x, y = resnet
    rounded = nn.Sequential(OrderedDict(quantise=Rounded(), network=network)).eval()
    few = {"inner_points": 99, "random_inner": 20, "random_corners": 20, "canaries": 2}
    binarization = binarization_test(rounded, HEALTHY, x, replace(LINF, epsilon=8 / 255), **few)
    assert "Most likely cause: The gradient at the input is exactly zero: quantise" in binarization.content["reason"]
    assert 'bpda="quantise"' in str(binarization)
    text = " ".join(str(robust_accuracy(rounded, HEALTHY, x, y, replace(LINF, epsilon=8 / 255))).split())
    assert text.index("gradient at the input is exactly zero: quantise") < text.index("worst case")
    fixed = f"robust_ext:AdaptedAttack(attack='{HEALTHY}', bpda='quantise')"
    assert binarization_test(rounded, fixed, x, replace(LINF, epsilon=8 / 255), **few).score >= 0.95
    assert robust_accuracy(rounded, fixed, x, y, replace(LINF, epsilon=8 / 255)).robust_accuracy(8 / 255) <= 0.1
    # Short of the edge of a ball that holds adversarial examples.
    short = robust_accuracy(network, SHORT, x, y, replace(LINF, epsilon=1 / 255))
    assert codes(short) == ["short_path"]
    for words in ("20 steps x 0.0333 epsilon end at 0.667 epsilon", "rel_stepsize 0.125", "steps 80"):
        assert words in " ".join(str(short).split())
    (remedy, _) = short.content["findings"][0]["remedies"]
    fixed = robust_accuracy(network, remedy["attack"], x, y, replace(LINF, epsilon=1 / 255))
    assert codes(fixed) == []
    assert fixed.robust_accuracy(1 / 255) < short.robust_accuracy(1 / 255)
