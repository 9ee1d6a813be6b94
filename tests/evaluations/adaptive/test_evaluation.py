"""The evaluation of test-time defenses: masked gradients, randomness, groups, resuming, warnings, and what is shown."""

import json
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from robust_ext import ThreatModel, as_attack, evaluate_defense
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, RunFolderError
from robust_ext.datasets import load_dataset
from robust_ext.defenses import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.demo.run import Rounded
from robust_ext.evaluations.adaptive import AdaptiveSettings, Step
from robust_ext.evaluations.adaptive.content import _worst_case
from robust_ext.evaluations.adaptive.findings import find_signs
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.company import one_image
from robust_ext.models.rows import Solution
from tests.evaluations.small import timeless
from tests.evaluations.subjects import rounded

THREAT = ThreatModel(norm="linf", epsilon=0.15)
SHORT = {"steps": 8, "queries": 20, "full": True}


class Noise:
    random = True

    def __call__(self, x):
        return (x + 0.15 * torch.randn_like(x)).clamp(0, 1)


class Centred(AdaptiveDefense):
    """Takes the mean of its group of four off every image: what one row gets depends on the others."""

    batch_level = True

    def __init__(self, classifier):
        super().__init__(classifier, group_size=4)

    def solve(self, x, rng, *, record):
        return Solution(x - 0.1 * (x.mean(0, keepdim=True) - x.mean()), (x,))


class Leaving(Attack):
    """Keeps the rows in order, or says that it may not."""

    def __init__(self, batching="full", *, raises=False):
        self.name = "leaving"
        self.traits = AttackTraits(batching=batching, gradients=False)
        self.calls = Mock(side_effect=RuntimeError("stopped") if raises else None)

    def search(self, target, inputs, labels, *, threat_model, generator):
        self.calls()
        return inputs


@pytest.fixture(scope="module")
def subject():
    inputs, labels = load_dataset("digits").take(range(24))
    return digits_network(), inputs, labels


def evaluate(subject, defense, **keywords):
    network, inputs, labels = subject
    attacks = ["recommended", *keywords.pop("attacks", ())]
    return evaluate_defense(defense, attacks, inputs, labels, THREAT, classifier=network, **{**SHORT, **keywords})


def accuracy(result, part="defended"):
    return {attack["name"]: attack["robust_accuracy"] for attack in result.content[part]["attacks"]}


def plain(content):
    return timeless(json.loads(json.dumps(content)))


def test_rounding_hides_from_gradients_and_from_nothing_else(subject):
    result = evaluate(subject, rounded)
    found = accuracy(result)
    assert min(found[f"APGD-{loss}, plain gradients"] for loss in ("ce", "margin")) > 0.9
    assert max(found[f"APGD-{loss}, BPDA identity"] for loss in ("ce", "margin")) < 0.3
    assert result.defended < 0.3
    assert any("gradients are zero on 100%" in warning for warning in result.content["warnings"])
    # The paper's finding: no more robust than the static model.
    low, high = result.content["gain"]["interval"]
    assert low <= 0.05
    assert low <= result.content["gain"]["robust_accuracy"] <= high


def test_a_defense_without_a_graph_is_attacked_by_the_rest(subject):
    """What needs its gradients is refused and told of, the naive attack too; the identity gets through."""
    result = evaluate(subject, lambda x: rounded(x.detach()))
    refused = {entry["name"] for entry in result.content["refused"]}
    plain = {f"APGD-{loss}, plain gradients" for loss in ("ce", "margin", "targeted-dlr")}
    assert refused == {"PGD-20 on the defense", *plain}
    assert result.defended < 0.3
    assert {row["category"] for row in result.content["categories"]} == {"naive", "transfer", "black-box", "white-box"}


def test_losses_restarts_and_aims_of_every_apgd(subject):
    """A targeted loss takes a run for each class it aims at, and every restart as much again."""
    found = evaluate(
        subject, lambda x: x, losses=["dlr", "targeted-dlr"], restarts=2, target_classes=2, only=["transfer"]
    )
    spent = {one["name"]: one["passes"] for one in found.content["defended"]["attacks"]}
    runs = {"dlr": (2, 0), "targeted-dlr": (4, 1)}
    # 50 steps, the last point's loss, and a pass that ranks the classes.
    assert spent == {
        f"APGD-{loss} on the static model": {"forward": 24 * (51 * count + ranked), "backward": 24 * 50 * count}
        for loss, (count, ranked) in runs.items()
    }


def test_full_adds_held_draws_and_fewer_inner_steps(subject):
    network, inputs, labels = subject
    defense = HedgeDefense(network, steps=8, radius=0.1, step_size=0.05)
    run = {**SHORT, "steps": 2, "draws": 3, "repeats": 2, "losses": ["ce"], "only": ["white-box"]}
    found = evaluate_defense(defense, None, inputs[:4], labels[:4], THREAT, **run)
    spent = {one["name"]: one["passes"] for one in found.content["defended"]["attacks"]}
    # Three points are queried, two of them with a gradient, for which several draws are made once more. A query is all
    # inner steps and the readout, whose pass back is the gradient.
    for words, draws, queries, inner in (("", 3, 5, 8), (", one draw held", 1, 3, 8), (", 2 inner steps", 3, 5, 2)):
        wanted = {"forward": 4 * draws * queries * (inner + 1), "backward": 4 * draws * (queries * inner + 2)}
        assert spent[f"APGD-ce, BPDA identity{words}"] == wanted
    attack = as_attack("robust_ext:APGD()")
    step = Step(name="held", category="white-box", attack=attack, exposure="identity", held=True)
    held = step.module(defense, AdaptiveSettings(seed=3))
    first, second = held(inputs), held(inputs)
    assert torch.equal(first, second)
    assert not torch.equal(first, step.module(defense, AdaptiveSettings(seed=4))(inputs))


def test_black_box_attacks_in_l1(subject):
    network, inputs, labels = subject
    threat_model = ThreatModel(norm="l1", epsilon=3.0)
    run = {**SHORT, "only": ["black-box"], "queries": 60}
    found = evaluate_defense(lambda x: x, None, inputs, labels, threat_model, classifier=network, **run)
    assert [one["name"] for one in found.content["defended"]["attacks"]] == [
        "Square on the static model",
        "Square on the defense",
    ]
    assert found.defended < found.content["defended"]["clean_accuracy"]


def test_no_defense_at_all(subject):
    """It gains nothing, costs one pass, and everything that is run on the static model does the same to it."""
    result = evaluate(subject, lambda x: x)
    assert accuracy(result) == accuracy(result, "static")
    assert result.content["gain"] == {"robust_accuracy": 0.0, "interval": [0.0, 0.0]}
    assert result.static == result.defended
    assert (result.content["cost"]["forward"], result.content["cost"]["backward"]) == (1, 0)
    assert result.content["warnings"] == []


def test_worst_case_is_below_every_attack(subject):
    for defense in (rounded, Noise()):
        result = evaluate(subject, defense, repeats=3, draws=2)
        for part, worst in (("static", result.static), ("defended", result.defended)):
            assert worst <= min(accuracy(result, part).values()) + 1e-12
            assert worst <= result.content[part]["clean_accuracy"] + 1e-12
        assert min(row["without"] for row in result.content["categories"]) >= result.defended - 0.1
        lost = sum(result.content["defended"]["worst_case"]["by"].values())
        assert lost == round(24 * (1 - result.content["defended"]["worst_case"]["majority"]))


@pytest.mark.exhaustive
def test_a_random_defense_is_asked_afresh(subject):
    first, again, other = (evaluate(subject, Noise(), repeats=3, draws=2, seed=seed) for seed in (0, 0, 1))
    single = evaluate(subject, Noise(), repeats=1, draws=1)
    assert plain(first.content) == plain(again.content)
    assert plain(first.content) != plain(other.content)
    assert first.content["random"]
    assert any(attack["deviation"] > 0 for attack in first.content["defended"]["attacks"])
    assert any("single draw" in warning for warning in single.content["warnings"])


def test_judged_by_fresh_answers():
    """Of attacks that do nothing, one is always lucky on a sample; fresh answers see through it."""
    first, second = (torch.rand(2, 20, 400, 3, generator=torch.Generator().manual_seed(0)) < 0.9).double().numpy()
    worst, left = _worst_case(first, second, np.ones((20, 400), dtype=bool))
    assert first.mean(2).min(0).mean() < 0.6
    assert 0.85 < left.mean() < 0.92
    assert worst.shape == (400,)


def test_groups_keep_their_composition(subject):
    network, inputs, labels = subject
    result = evaluate(subject, Centred, batch_size=10)
    assert result.content["batch_level"]
    # Blocks of two whole groups; one of ten rows would be refused by the defense.
    expected = float((Centred(network)(inputs).argmax(1) == labels).double().mean())
    assert result.content["defended"]["clean_accuracy"] == pytest.approx(expected)
    with pytest.raises(InvalidArgumentError, match="multiple of 4"):
        evaluate_defense(Centred(network), None, inputs[:6], labels[:6], THREAT, **SHORT)
    step = Step(name="other order", category="black-box", attack=Leaving(batching="any"), exposure="defense")
    with pytest.raises(AttackRefusedError):
        evaluate(subject, Centred, attacks=[step])


def test_one_image_is_attacked_beside_negatives_that_stay(subject):
    """Rows on their own are attacked in any batches, and no group has to be whole."""
    network, inputs, labels = subject
    rows, negatives = slice(0, 6), inputs[-5:]
    step = Step(name="any order", category="black-box", attack=Leaving(batching="any"), exposure="defense")
    result = evaluate_defense(
        Centred(network), [step], inputs[rows], labels[rows], THREAT, negatives=negatives, **SHORT
    )
    alone = torch.cat([Centred(network)(torch.cat([row[None], negatives[:3]]))[:1] for row in inputs[rows]])
    expected = float((alone.argmax(1) == labels[rows]).double().mean())
    assert result.content["defended"]["clean_accuracy"] == pytest.approx(expected)
    made = evaluate_defense(
        one_image(Centred(network), negatives[:3]), [step], inputs[rows], labels[rows], THREAT, **SHORT
    )
    assert made.defended == result.defended
    for defense, images in ((Centred(network), negatives[:2]), (rounded, negatives)):
        with pytest.raises(InvalidArgumentError):
            evaluate_defense(defense, [step], inputs[rows], labels[rows], THREAT, classifier=network, negatives=images)


def test_signs_of_a_weak_evaluation():
    def content(**kinds):
        keys = ("category", "robust_accuracy")
        attacks = [
            {"name": name, "deviation": 0.0, "exposure": "defense", **dict(zip(keys, kinds[name], strict=True))}
            for name in kinds
        ]
        parts = {"static": {"clean_accuracy": 0.9}, "defended": {"clean_accuracy": 0.9, "attacks": attacks}}
        return {"samples": 100, "random": False, "settings": {"draws": 4}, "not_run": [], **parts}

    def _warnings(content):
        return find_signs(content, {one["name"]: (100, 0) for one in content["defended"]["attacks"]})

    white = ("white-box", 0.5)
    found = [
        _warnings(content(a=white, **{name: (kind, 0.3)}))
        for name, kind in (("FGSM", "white-box"), ("b", "black-box"), ("b", "transfer"))
    ]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len({one[0] for one in found}) == 3
    # One sample is no sign.
    assert _warnings(content(a=white)) == _warnings(content(a=white, b=("transfer", 0.49))) == []


def test_points_are_transferred_from_further_networks(subject, tmp_path):
    network, inputs, labels = subject
    hidden = (Rounded(network), inputs, labels)
    run = {"surrogates": {"bare": network}, "out": tmp_path}
    result = evaluate(hidden, lambda x: x, **run)
    static, defended = accuracy(result, "static"), accuracy(result)
    assert min(static[f"APGD-{loss} on the static model"] for loss in ("ce", "margin")) > 0.9
    assert max(static[f"APGD-{loss} on bare"] for loss in ("ce", "margin")) < 0.3
    assert static["APGD-ce on bare"] == defended["APGD-ce on bare"]
    assert result.defended <= defended["APGD-ce on bare"]
    # Another network of that name is another run.
    other = digits_network()
    with torch.no_grad():
        next(iter(other.parameters())).add_(0.01)
    with pytest.raises(RunFolderError, match="surrogates"):
        evaluate(hidden, lambda x: x, **run | {"surrogates": {"bare": other}})
