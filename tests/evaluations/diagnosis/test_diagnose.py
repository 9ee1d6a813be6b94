"""A diagnosis as a whole: what it runs, finds and tries; attacks that raise, refused models; trials and references."""

import copy

import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import AttackError, ModelError, ThreatModel
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.core import finding_texts as reports
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.inputs import prepare_inputs
from robust_ext.engine.task import run_task
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.diagnosis.examination import Examination
from robust_ext.evaluations.diagnosis.examining import Examiner
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings
from robust_ext.evaluations.diagnosis.trying import Trials, reordered
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.diagnosis.zoo.networks import scaled
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK
from tests.evaluations.subjects import climb

SMALL = {"planted": 6, "inner_points": 30, "queries": 10, "random_points": 10}
ALONE = {"planted": 0, "references": False}
STRONG = "robust_ext:APGD(steps=20, loss='margin')"


def diagnose(model=NETWORK, attacks=STRONG, **changes):
    return robust_ext.diagnose(model, attacks, INPUTS, LABELS, LINF, **{**SMALL, **changes})


def codes(result):
    return [one.code for one in result.findings if one.weight != "low"]


def crawl(model, x, y, threat_model):
    return climb(model, x, y, epsilon=threat_model.epsilon, step=0.01)


class Does(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.network, self.function = NETWORK, function
        self.eval()

    def forward(self, x):
        return self.function(self.network, x)


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
    tried = diagnose(attacks=weak, try_remedies=True, seed=1).content["tried"]
    assert tried[0]["confirmed"]
    helped = [entry for entry in tried if (entry["after"]["score"] or 0) >= 0.95]
    assert len(helped) == 1, "nothing is tried after what lets the attack find what is planted"
    for entry in tried:
        if entry["remedy"]["attack"] is not None and entry["after"] is not None:
            alone = robust_ext.robust_accuracy(NETWORK, {weak: entry["remedy"]["attack"]}, INPUTS, LABELS, LINF)
            assert entry["after"]["robust_accuracy"] == alone.robust_accuracy(0.1)


def key(model, x, y):
    return model(x.clone().requires_grad_()) * {}["steps"]


def graph_twice(model, x, y):
    x = x.clone().requires_grad_()
    loss = model(x).pow(2).sum()
    return torch.autograd.grad(loss, x)[0] + torch.autograd.grad(loss, x)[0]


@pytest.mark.parametrize(
    ("attack", "raised"), [(key, "KeyError: 'steps'"), (graph_twice, "backward through the graph a second time")]
)
def test_what_was_raised_is_the_cause(attack, raised):
    result = diagnose(attacks=attack, **ALONE)
    assert codes(result) == ["crashed"]
    assert raised in result.likely.cause
    assert "graph (detach" not in str(result)
    with pytest.raises(AttackError) as error:
        robust_ext.binarization_test(NETWORK, attack, INPUTS, LINF, inner_points=50)
    assert "cuts the graph" not in str(error.value)


def test_what_cuts_the_graph_comes_before_what_was_raised_for_it():
    result = diagnose(Does(lambda network, x: network(x.detach())), {"mine": crawl}, references=False)
    assert codes(result) == ["cut_gradient", "crashed"]
    assert result.content["attacks"][0]["error"].startswith("mine: ")


def of_size(*sizes):
    def run(network, x):
        if len(x) not in sizes:
            raise RuntimeError(f"got {len(x)} rows")
        return network(x)

    return run


def divides(network, x):
    if bool((x == 1).flatten(1).all(1).any()):
        raise ZeroDivisionError("saturated image")
    return network(x)


REFUSED = {
    # What the cause names, and whether batches of other sizes are blamed
    "any": (lambda network, x: {}["mask"], "raises on 4 inputs", False),
    "fixed batch": (of_size(10, 4), "on a single row", True),
    "fixed batch of all": (of_size(10), "raises on 4 inputs", True),
    "squeeze": (lambda network, x: network(x).squeeze(), "no row of logits for each input on a single row", True),
    "a bound": (divides, "where the other rows lie at a bound", False),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_model_does_not_take_is_what_was_tried(name):
    function, words, sizes = REFUSED[name]
    result = diagnose(Does(function))
    (finding,) = result.content["findings"]
    assert finding["code"] == "crashed"
    assert words in finding["cause"]
    assert ("any size" in finding["remedies"][0]["words"]) == sizes
    assert result.content["not_run"]


def optimised(network, x, *, take, on):
    with torch.set_grad_enabled(on or torch.is_grad_enabled()):
        leaf = x.detach().requires_grad_()
        energy = network(leaf).square().sum()
        if take == "grad":
            return (leaf - 0.01 * torch.autograd.grad(energy, leaf)[0]).detach()
        energy.backward()
        return (leaf - 0.01 * leaf.grad).detach()


@pytest.mark.parametrize("take", ["grad", "backward"])
@pytest.mark.parametrize("on", [True, False])
def test_a_model_that_takes_gradients_while_it_runs_is_pointed_to_the_evaluation_of_defenses(take, on):
    model = Does(lambda network, x: network(optimised(network, x, take=take, on=on)))
    first = diagnose(model, **ALONE).content["findings"][0]
    names = {"model": model, "inputs": INPUTS[:4], "labels": LABELS[:4], "threat_model": LINF, "static_model": NETWORK}
    code = first["remedies"][0]["paste"].replace("None, inputs", "'robust_ext:RandomSearch(points=20)', inputs")
    exec(code, names)  # noqa: S102
    assert names["result"].content["kind"] == "test_time"
    if not on:
        with pytest.raises(ModelError, match="evaluate_defense"):
            robust_ext.robust_accuracy(model, STRONG, INPUTS, LABELS, LINF)


# Remedies that are tried, and attacks to compare with.
IMAGES, DIGITS = load_dataset("digits").take(range(32))
BALL = ThreatModel(norm="linf", epsilon=0.12)
SHORT = {"planted": 6, "inner_points": 50, "queries": 50, "random_points": 20, "try_remedies": True}


def test_references_run_through_the_view_that_helps():
    model, weak = scaled(1000), "foolbox:LinfPGD(steps=4, rel_stepsize=0.4)"
    result = robust_ext.diagnose(model, weak, IMAGES, DIGITS, BALL, **SHORT)
    entry = next(one for one in result.content["tried"] if one["confirmed"])
    assert result.content["reason"].startswith("The confirmed cause")
    through = next(one for one in entry["beside"] if "through" in one["name"])
    reference = AdaptedAttack(attack=APGD(steps=25, loss="margin"), temperature=1000.0)
    alone = robust_ext.robust_accuracy(model, {through["name"]: reference}, IMAGES, DIGITS, BALL)
    assert through["robust_accuracy"] == alone.robust_accuracy(BALL.epsilon)
    best = min(entry["beside"], key=lambda one: one["robust_accuracy"])
    lower = best["robust_accuracy"] < entry["after"]["robust_accuracy"]
    assert (best["text"] in result.content["next"][0]["command"].replace("\\'", "'")) == lower


@pytest.mark.parametrize(("view", "outcome"), [({"temperature": 1.5}, "changes nothing"), ({"noise": 30.0}, "worse")])
def test_what_makes_a_sound_attack_worse_is_said(view, outcome):
    attack = robust_ext.as_attack(climb, name="climb")
    data = {"sample_ids": range(16), "batch_size": 16}
    given = prepare_inputs(digits_network(), IMAGES[:16], DIGITS[:16], threat_model=BALL, **data)
    examiner = Examiner(given=given, settings=DiagnosisSettings(planted=4, inner_points=50), out=None, worker=run_task)
    examination = Examination(examiner=examiner, attacks={attack.name: examiner.examine(attack)})
    trials = Trials(attacks={attack.name: attack}, examination=examination, in_eval_mode=lambda: None)
    finding = Finding(code="flat_loss", cause="Flat.", attack=attack.name, remedies=(Remedy(words="Do.", view=view),))
    (entry,) = trials.run([finding])
    assert (entry["outcome"], entry["confirmed"], entry["beside"]) == (outcome, False, [])


@pytest.mark.parametrize("name", ["mine", None])
def test_what_did_not_help_stands_last(name):
    proposed = {letter: Remedy(words=f"Do {letter}.", view={"temperature": ord(letter)}) for letter in "abcd"}
    outcomes = {"a": "worse", "b": "within noise", "d": "confirmed"}
    tried = [
        {"attack": "mine", "outcome": outcome, "remedy": proposed[letter].to_dict()}
        for letter, outcome in outcomes.items()
    ]
    finding = Finding(code="saturated_loss", cause="Flat.", attack=name, remedies=tuple(proposed.values()))
    (found,) = reordered([finding], tried, {"mine": APGD()})
    assert "".join(one.words[3] for one in found.remedies) == "dcba"
    assert "do a" not in reports.remedy(found.to_dict()).lower()
    assert Finding.from_dict(found.to_dict()) == found
