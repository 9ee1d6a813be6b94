"""A diagnosis as a whole: what it runs, finds and tries, against the evaluations it is made of."""

import copy

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ModelError, ThreatModel
from robust_ext.engine.context import RunContext, run_context
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.diagnosis.content import next_steps
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, essence

SMALL = {"planted": 6, "inner_points": 30, "queries": 10, "random_points": 10}
STRONG = "robust_ext:APGD(steps=20, loss='margin')"


def diagnose(model=NETWORK, attacks=STRONG, **changes):
    return robust_ext.diagnose(model, attacks, INPUTS, LABELS, LINF, **{**SMALL, **changes})


def crawl(model, x, y, threat_model):
    """Twenty steps that end at a fifth of the budget."""
    adversarial = x.clone()
    for _ in range(20):
        adversarial.requires_grad_()
        (gradient,) = torch.autograd.grad(
            nn.functional.cross_entropy(model(adversarial), y, reduction="sum"), adversarial
        )
        moved = adversarial.detach() + threat_model.epsilon / 100 * gradient.sign()
        adversarial = (x + (moved - x).clamp(-threat_model.epsilon, threat_model.epsilon)).clamp(0, 1)
    return adversarial


def raising(model, x, y):
    raise AssertionError


class Rounding(nn.Module):
    """Sixteen levels."""

    def forward(self, x):
        return (x * 15).round() / 15


class Cut(nn.Module):
    """Attacks get no gradient of it."""

    def forward(self, x):
        return NETWORK(x.detach())


def test_a_strong_attack_on_a_healthy_model():
    result = diagnose()
    assert result.likely is None
    assert result.content["reason"].startswith("None of the known causes applies")
    assert "robust_ext.binarization_test(model, attack, inputs, threat_model)" in str(result)


def test_numbers_are_those_of_the_evaluations():
    result = diagnose(attacks={"crawl": crawl, "strong": STRONG})
    attacks = {one["name"]: one for one in result.content["attacks"]}
    settings = {"inner_points": 30, "seed": 0, "judge_seed": 0}
    for name, attack in {"crawl": crawl, "strong": STRONG}.items():
        given = {name: attack}
        for epsilon, found in ((0.1, attacks[name]), (0.2, attacks[name]["larger"]["larger"])):
            model = ThreatModel(norm="linf", epsilon=epsilon)
            alone = robust_ext.robust_accuracy(NETWORK, given, INPUTS, LABELS, model)
            assert found["robust_accuracy"] == alone.robust_accuracy(epsilon)
        planted = robust_ext.binarization_test(NETWORK, given, INPUTS[:6], LINF, **settings)
        assert (attacks[name]["score"], attacks[name]["planted"]) == (planted.score, 6)
    assert attacks["crawl"]["score"] < attacks["strong"]["score"]
    assert result.likely.attack == "crawl"


def test_planted_problems_have_the_readout_of_the_settings(tmp_path):
    result = diagnose(references=False, readout="nearest(k=2)", out=tmp_path)
    (planted,) = tmp_path.glob("binarization/*/result.json")
    assert robust_ext.load_result(planted).content["settings"]["readout"] == "nearest(k=2)"
    assert result.content["settings"]["readout"] == "nearest(k=2)"
    with pytest.raises(robust_ext.InvalidArgumentError, match="readout: got 'nearer'"):
        diagnose(readout="nearer")


def test_what_goes_on_in_a_folder_ends_the_same(tmp_path):
    given = {"attacks": {"crawl": crawl}, "references": False}
    results = [diagnose(**given, out=tmp_path) for _ in range(2)]
    assert essence(results[0]) == essence(results[1])
    assert results[1] == diagnose(**given)
    assert results[1].content["attacks"][0]["seconds"] == results[0].content["attacks"][0]["seconds"]
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("model", "codes"), [(NETWORK, ["crashed"]), (Cut().eval(), ["cut_gradient", "crashed"])])
def test_an_attack_that_raises_is_a_finding(model, codes):
    attack = raising if model is NETWORK else crawl
    result = diagnose(model, {"mine": attack}, references=False)
    assert [finding.code for finding in result.findings] == codes
    assert result.content["attacks"][0]["error"].startswith("mine: ")
    assert "raised" in str(result)


def test_what_attacks_get_past_is_no_cause():
    """Rounding stops gradients, and an attack that takes none finds all that is planted."""
    network = nn.Sequential(Rounding(), NETWORK).eval()
    free = diagnose(network, "robust_ext:Square(queries=600)", references=False)
    assert free.content["attacks"][0]["score"] >= 0.95
    assert free.likely is None
    assert "got past" in str(free)
    assert diagnose(network, references=False).likely.code == "zero_gradient"


def test_a_model_that_cannot_be_evaluated_is_a_finding():
    network = nn.Sequential(nn.Dropout(0.5), copy.deepcopy(NETWORK)).train()
    result = diagnose(network, try_remedies=True)
    assert result.likely.code == "train_mode"
    assert "train mode" in result.content["not_run"]
    assert result.content["attacks"] == []
    (tried,) = result.content["tried"]
    assert tried["remedy"]["evaluate"]
    assert tried["confirmed"]
    assert tried["after"]["score"] == diagnose(copy.deepcopy(network).eval()).content["attacks"][0]["score"]
    assert network.training, "the model is left as it was"


def test_a_model_that_returns_no_logits_is_refused_and_nothing_else_is_said():
    with pytest.raises(ModelError, match=r"returned shape \(64,\)"):
        diagnose(nn.Flatten(0).eval())


def test_remedies_are_tried_on_the_same_samples():
    weak = "robust_ext:ObjectivePGD(steps=20, step_size=0.002)"
    result = diagnose(attacks=weak, try_remedies=True)
    tried = result.content["tried"]
    assert tried[0]["confirmed"]
    helped = [entry for entry in tried if (entry["after"]["score"] or 0) >= 0.95]
    assert len(helped) == 1, "nothing is tried after what lets the attack find what is planted"
    assert str(result).startswith("The confirmed cause: ")
    for entry in tried:
        if entry["remedy"]["attack"] is not None and entry["after"] is not None:
            alone = robust_ext.robust_accuracy(
                NETWORK, {weak: entry["remedy"]["attack"]}, INPUTS, LABELS, LINF
            ).robust_accuracy(0.1)
            assert entry["after"]["robust_accuracy"] == alone


FAULT = Finding(code="short_path", cause="Short.", remedies=(Remedy(words="Go on.", attack="foolbox:X(loss='a')"),))
MODEL = Finding(code="train_mode", cause="Train.", remedies=(Remedy(words="Evaluate.", code="model.eval()"),))
GIVEN = "diagnose --model m.py --attack A --eps=8/255 --out here --samples 9 --no-references --layer fc --attack=B"
TRIED = {
    "confirmed": True,
    "outcome": "confirmed",
    "beside": [],
    "after": {"robust_accuracy": 0.5},
    "remedy": FAULT.remedies[0].to_dict(),
}
TEXT = "robust_ext:X(loss='a')"


@pytest.mark.parametrize(
    ("likely", "tried", "expected"),
    [
        (None, None, "binarization --model m.py --attack A --eps=8/255 --layer fc --attack=B"),
        (FAULT, None, f"{GIVEN} --try-remedies"),
        (FAULT, [TRIED | {"text": TEXT}], f'binarization --model m.py --eps=8/255 --layer fc --attack "{TEXT}"'),
        (FAULT, [TRIED | {"outcome": "within noise"}], GIVEN),
        (
            FAULT,
            [TRIED | {"text": TEXT, "beside": [{"name": "Y", "text": "Y", "robust_accuracy": 0.4}]}],
            "binarization --model m.py --eps=8/255 --layer fc --attack Y",
        ),
        (MODEL, None, GIVEN),
    ],
)
def test_what_to_run_next(likely, tried, expected):
    with run_context(RunContext(command=GIVEN.split())):
        steps = next_steps(likely, tried, refused=False, plantable=True)
    assert steps[0]["command"] == f"robust-ext {expected}"


SLOW = {
    "foolbox": "foolbox:LinfPGD(steps=20, rel_stepsize=0.02)",
    "ART": "art:ProjectedGradientDescent(max_iter=20, eps_step=0.002)",
    "torchattacks": "torchattacks:PGD(steps=20, alpha=0.002)",
    "adv-lib": "adv_lib:pgd_linf(steps=20, absolute_step_size=0.002)",
    "function": f"{__file__}:crawl",
}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("attack", "isolate"),
    [
        *(pytest.param(attack, False, id=name) for name, attack in SLOW.items()),
        *(pytest.param(SLOW[name], True, id=f"{name}, at arm's length") for name in ("foolbox", "function")),
    ],
)
def test_attacks_of_every_library(attack, isolate):
    result = diagnose(attacks=attack, isolate=isolate, try_remedies=True)
    assert result.likely.code == "short_path"
    # A function of the user's has no settings that are known here.
    assert attack == SLOW["function"] or result.content["tried"][0]["confirmed"]
