"""The evaluation of test-time defenses: masked gradients, randomness, groups, warnings, and what is spent."""

import json

import numpy as np
import pytest
import torch

from robust_ext import ThreatModel, as_attack, evaluate_defense
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.cost import Cost
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
NETWORK = digits_network()
INPUTS, LABELS = load_dataset("digits").take(range(24))
APGD = tuple(f"APGD-{loss}" for loss in ("ce", "margin"))


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


class Still(Attack):
    """Returns its inputs, after passes of the target and whatever ``does`` does with it."""

    def __init__(self, name, *, does=lambda target: None, passes=1, batching="full"):
        self.name, self.does, self.passes = name, does, passes
        self.traits = AttackTraits(batching=batching, gradients=False)

    def cost(self, threat_model, *, classes):
        return Cost(self.passes)

    def search(self, target, inputs, labels, *, threat_model, generator):
        for _ in range(self.passes):
            target.module(inputs)
        self.does(target)
        return inputs


def step(attack, category="black-box", **more):
    return Step(name=attack.name, category=category, attack=attack, **{"exposure": "defense", **more})


def evaluate(defense, attacks=None, inputs=INPUTS, labels=LABELS, threat=THREAT, **settings):
    return evaluate_defense(defense, attacks, inputs, labels, threat, **{"classifier": NETWORK, **SHORT, **settings})


def by_name(result, key="robust_accuracy", part="defended"):
    return {attack["name"]: attack[key] for attack in result.content[part]["attacks"]}


def plain(content):
    return timeless(json.loads(json.dumps(content)))


def test_rounding_hides_from_gradients_and_from_nothing_else():
    result = evaluate(rounded)
    found = by_name(result)
    assert min(found[f"{name}, plain gradients"] for name in APGD) > 0.9
    assert max(found[f"{name}, BPDA identity"] for name in APGD) < 0.3
    assert result.defended < 0.3
    assert any("gradients are zero on 100%" in warning for warning in result.content["warnings"])
    # The paper's finding: no more robust than the static model.
    low, high = result.content["gain"]["interval"]
    assert low <= 0.05
    assert low <= result.content["gain"]["robust_accuracy"] <= high


def test_a_defense_without_a_graph_is_attacked_by_the_rest():
    """What needs its gradients is refused and told of, the naive attack too; the identity gets through."""
    result = evaluate(lambda x: rounded(x.detach()))
    refused = {f"{name}, plain gradients" for name in (*APGD, "APGD-targeted-dlr")} | {"PGD-20 on the defense"}
    assert {entry["name"] for entry in result.content["refused"]} == refused
    assert result.defended < 0.3
    assert {row["category"] for row in result.content["categories"]} == {"naive", "transfer", "black-box", "white-box"}


def test_losses_restarts_and_aims_of_every_apgd():
    """A targeted loss takes a run for each class it aims at, and every restart as much again."""
    run = {"losses": ["dlr", "targeted-dlr"], "restarts": 2, "target_classes": 2, "only": ["transfer"]}
    # 50 steps, the last point's loss, and a pass that ranks the classes.
    assert by_name(evaluate(lambda x: x, **run), "passes") == {
        f"APGD-{loss} on the static model": {"forward": 24 * (51 * count + ranked), "backward": 24 * 50 * count}
        for loss, count, ranked in (("dlr", 2, 0), ("targeted-dlr", 4, 1))
    }


def test_full_adds_held_draws_and_fewer_inner_steps():
    defense = HedgeDefense(NETWORK, steps=8, radius=0.1, step_size=0.05)
    run = {"steps": 2, "draws": 3, "repeats": 2, "losses": ["ce"], "only": ["white-box"], "classifier": None}
    spent = by_name(evaluate(defense, None, INPUTS[:4], LABELS[:4], **run), "passes")
    # Three points are queried, two of them with a gradient, for which several draws are made once more. A query is all
    # inner steps and the readout, whose pass back is the gradient.
    for words, draws, queries, inner in (("", 3, 5, 8), (", one draw held", 1, 3, 8), (", 2 inner steps", 3, 5, 2)):
        wanted = {"forward": 4 * draws * queries * (inner + 1), "backward": 4 * draws * (queries * inner + 2)}
        assert spent[f"APGD-ce, BPDA identity{words}"] == wanted
    held = step(as_attack("robust_ext:APGD()"), "white-box", exposure="identity", held=True)
    first, again, other = (held.module(defense, AdaptiveSettings(seed=seed))(INPUTS) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_black_box_attacks_in_l1():
    result = evaluate(lambda x: x, threat=ThreatModel(norm="l1", epsilon=3.0), only=["black-box"], queries=60)
    assert [*by_name(result)] == ["Square on the static model", "Square on the defense"]
    assert result.defended < result.content["defended"]["clean_accuracy"]


def test_no_defense_at_all():
    """It gains nothing, costs one pass, and everything that is run on the static model does the same to it."""
    result = evaluate(lambda x: x)
    assert by_name(result) == by_name(result, part="static")
    assert result.content["gain"] == {"robust_accuracy": 0.0, "interval": [0.0, 0.0]}
    assert result.static == result.defended
    assert (result.content["cost"]["forward"], result.content["cost"]["backward"]) == (1, 0)
    assert result.content["warnings"] == []


@pytest.mark.exhaustive
def test_a_random_defense_is_asked_afresh():
    first, again, other = (evaluate(Noise(), repeats=3, draws=2, seed=seed) for seed in (0, 0, 1))
    single = evaluate(Noise(), repeats=1, draws=1)
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


def test_groups_keep_their_composition():
    result = evaluate(Centred, batch_size=10)
    assert result.content["batch_level"]
    # Blocks of two whole groups; one of ten rows would be refused by the defense.
    expected = float((Centred(NETWORK)(INPUTS).argmax(1) == LABELS).double().mean())
    assert result.content["defended"]["clean_accuracy"] == pytest.approx(expected)
    with pytest.raises(InvalidArgumentError, match="multiple of 4"):
        evaluate(Centred, None, INPUTS[:6], LABELS[:6])
    with pytest.raises(AttackRefusedError):
        evaluate(Centred, [step(Still("other order", batching="any"))])


def test_one_image_is_attacked_beside_negatives_that_stay():
    """Rows on their own are attacked in any batches, and no group has to be whole."""
    inputs, labels, negatives = INPUTS[:6], LABELS[:6], INPUTS[-5:]
    given = [step(Still("any order", batching="any"))], inputs, labels
    result = evaluate(Centred, *given, negatives=negatives)
    alone = torch.cat([Centred(NETWORK)(torch.cat([row[None], negatives[:3]]))[:1] for row in inputs])
    expected = float((alone.argmax(1) == labels).double().mean())
    assert result.content["defended"]["clean_accuracy"] == pytest.approx(expected)
    made = evaluate(one_image(Centred(NETWORK), negatives[:3]), *given, classifier=None)
    assert made.defended == result.defended
    for defense, images in ((Centred, negatives[:2]), (rounded, negatives)):
        with pytest.raises(InvalidArgumentError):
            evaluate(defense, *given, negatives=images)


def test_signs_of_a_weak_evaluation():
    def signs(**kinds):
        attacks = [
            {"name": name, "deviation": 0.0, "exposure": "defense", "category": category, "robust_accuracy": left}
            for name, (category, left) in ({"a": ("white-box", 0.5)} | kinds).items()
        ]
        parts = {"static": {"clean_accuracy": 0.9}, "defended": {"clean_accuracy": 0.9, "attacks": attacks}}
        content = {"samples": 100, "random": False, "settings": {"draws": 4}, "not_run": [], **parts}
        return find_signs(content, dict.fromkeys(["a", *kinds], (100, 0)))

    found = [signs(FGSM=("white-box", 0.3)), signs(b=("black-box", 0.3)), signs(b=("transfer", 0.3))]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len({one[0] for one in found}) == 3
    # One sample is no sign.
    assert signs() == signs(b=("transfer", 0.49)) == []


def test_points_are_transferred_from_further_networks(tmp_path):
    run = {"classifier": Rounded(NETWORK), "surrogates": {"bare": NETWORK}, "out": tmp_path}
    result = evaluate(lambda x: x, **run)
    static, defended = by_name(result, part="static"), by_name(result)
    assert min(static[f"{name} on the static model"] for name in APGD) > 0.9
    assert max(static[f"{name} on bare"] for name in APGD) < 0.3
    assert static["APGD-ce on bare"] == defended["APGD-ce on bare"]
    assert result.defended <= defended["APGD-ce on bare"]
    # Another network of that name is another run.
    other = digits_network()
    with torch.no_grad():
        next(iter(other.parameters())).add_(0.01)
    with pytest.raises(RunFolderError, match="surrogates"):
        evaluate(lambda x: x, **run | {"surrogates": {"bare": other}})
