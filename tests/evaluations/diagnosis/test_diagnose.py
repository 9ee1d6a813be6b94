"""A diagnosis as a whole: what it runs, finds and tries, against the evaluations it is made of, for every library."""

import copy
from collections import OrderedDict

import pytest
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.context import RunContext, run_context
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.diagnosis.content import next_steps
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, essence
from tests.evaluations.steps import climb

SMALL = {"planted": 6, "inner_points": 30, "queries": 10, "random_points": 10}


STRONG = "robust_ext:APGD(steps=20, loss='margin')"


def diagnose(model=NETWORK, attacks=STRONG, **changes):
    return robust_ext.diagnose(model, attacks, INPUTS, LABELS, LINF, **{**SMALL, **changes})


def crawl(model, x, y, threat_model):
    """Twenty steps that end at a fifth of the budget."""
    return climb(model, x, y, epsilon=threat_model.epsilon, step=0.01)


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


def test_what_attacks_get_past_is_no_cause():
    """Rounding stops gradients, and an attack that takes none finds all that is planted."""
    network = nn.Sequential(Rounding(), NETWORK).eval()
    free = diagnose(network, "robust_ext:Square(queries=600)", references=False)
    assert free.content["attacks"][0]["score"] >= 0.95
    assert free.likely is None
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


def test_remedies_are_tried_on_the_same_samples():
    weak = "robust_ext:ObjectivePGD(steps=20, step_size=0.002)"
    result = diagnose(attacks=weak, try_remedies=True)
    tried = result.content["tried"]
    assert tried[0]["confirmed"]
    helped = [entry for entry in tried if (entry["after"]["score"] or 0) >= 0.95]
    assert len(helped) == 1, "nothing is tried after what lets the attack find what is planted"
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


BALL = robust_ext.ThreatModel(norm="linf", epsilon=0.1)


class Quantise(nn.Module):
    def forward(self, x):
        return (x * 15).round() / 15


class Enlarge(nn.Module):
    def forward(self, logits):
        return logits * 1000


def plain(model, x, y, *, epsilon):
    return climb(model, x, y, epsilon=epsilon, steps=40, step=0.1)


def plain_tiny(model, x, y, *, epsilon):
    return climb(model, x, y, epsilon=epsilon, step=0.02)


# Without random starts, so that a path ends where its steps end.
GOOD = {
    "foolbox": "foolbox:LinfPGD(steps=40, rel_stepsize=0.1, random_start=False)",
    "art": "art:ProjectedGradientDescent(max_iter=40, eps_step=0.01)",
    "torchattacks": "torchattacks:PGD(steps=40, alpha=0.01, random_start=False)",
    "adv_lib": "adv_lib:pgd_linf(steps=40, relative_step_size=0.1, random_init=False)",
    "plain": plain,
}


TINY = {
    "foolbox": "foolbox:LinfPGD(steps=20, rel_stepsize=0.02, random_start=False)",
    "art": "art:ProjectedGradientDescent(max_iter=20, eps_step=0.002)",
    "torchattacks": "torchattacks:PGD(steps=20, alpha=0.002, random_start=False)",
    "adv_lib": "adv_lib:pgd_linf(steps=20, relative_step_size=0.02, random_init=False)",
    "plain": plain_tiny,
}


PACKAGES = ("foolbox", "art", "torchattacks", "adv_lib")


def rounded():
    return nn.Sequential(OrderedDict(quantise=Quantise(), network=digits_network())).eval()


def enlarged():
    return nn.Sequential(OrderedDict(network=digits_network(), enlarge=Enlarge())).eval()


FAULTS = {
    "rounding layer": (rounded, GOOD, ("zero_gradient", "quantise")),
    "steps too small": (digits_network, TINY, ("short_path", None)),
    "logits x 1000": (enlarged, GOOD, ("saturated_loss", None)),
}


def first_finding(fault, library, *, isolate, samples=16, **settings):
    make, attacks, expected = FAULTS[fault]
    if library in PACKAGES:
        pytest.importorskip(library)
    digits = load_dataset("digits")
    inputs, labels = digits.take(digits.choose(samples, seed=0))
    found = robust_ext.diagnose(make(), attacks[library], inputs, labels, BALL, isolate=isolate, **settings)
    if settings.get("try_remedies"):
        assert found.content["tried"][0]["confirmed"]
    first = found.findings[0]
    return (first.code, first.layer), expected


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("library", "isolate"), [*((name, False) for name in GOOD), ("foolbox", True), ("plain", True)]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_library_has_the_same_first_finding(fault, library, isolate):
    # A function of the user's has no settings that are known here.
    first, expected = first_finding(
        fault, library, isolate=isolate, try_remedies=fault == "steps too small" and library != "plain"
    )
    assert first == expected


def test_a_plain_function_has_it():
    first, expected = first_finding("rounding layer", "plain", isolate=False, samples=6, planted=0, references=False)
    assert first == expected
