"""Remedies that are tried, and attacks to compare with: what is confirmed, what is said of an attack that is beaten."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import robust_ext
from robust_ext import ThreatModel
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.apgd import APGD
from robust_ext.core import finding_texts as reports
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.inputs import prepare_inputs
from robust_ext.engine.task import run_task
from robust_ext.evaluations.causes.finding import COMPARISONS, Finding, Remedy
from robust_ext.evaluations.diagnosis.examination import Examination
from robust_ext.evaluations.diagnosis.examining import Examiner
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings
from robust_ext.evaluations.diagnosis.trying import Trials, reordered
from tests.evaluations.diagnosis.zoo.layers import Rounding
from tests.evaluations.diagnosis.zoo.networks import convolutional, scaled

INPUTS, LABELS = load_dataset("digits").take(range(32))
LINF = ThreatModel(norm="linf", epsilon=0.12)
FEW = {"planted": 6, "inner_points": 50, "queries": 50, "random_points": 20}


def margin(logits, y):
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return others - logits.gather(1, y[:, None]).squeeze(1)


def entropy(logits, y):
    return F.cross_entropy(logits, y, reduction="sum")


def climb(model, x, y, *, epsilon, steps=20, step=0.1, loss=entropy, decay=1.0, momentum=None, mask=None, start=None):
    """Sign steps from the input; its settings after ``step`` are faults, or none."""
    generator = torch.Generator().manual_seed(0)
    points, velocity = x.clone(), torch.zeros_like(x)
    if start is not None:
        points = (x + epsilon * start * (2 * torch.rand(x.shape, generator=generator) - 1)).clamp(0, 1)
    for number in range(steps):
        points = points.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(model(points), y), points)
        if momentum is not None:
            gradient = velocity = momentum(
                velocity, gradient / gradient.abs().mean((1, 2, 3), keepdim=True).clamp_min(1e-12)
            )
        move = step * decay**number * epsilon * gradient.sign()
        move = move if mask is None else move * mask(x)
        points = (x + (points.detach() + move - x).clamp(-epsilon, epsilon)).clamp(0, 1)
    return points.detach()


def best_of(model, x, y, *, epsilon):
    """Three runs from random points, of which the first that is adversarial is kept."""
    found = x
    for start in (0.3, 0.6, 1.0):
        points = climb(model, x, y, epsilon=epsilon, step=0.2, start=start)
        found = torch.where((model(points).argmax(1) != y).view(-1, 1, 1, 1), points, found)
    return found


FAULTY = {
    "moves half of the image": (partial(climb, mask=lambda x: torch.arange(8).view(8, 1) < 4), "loop_at_fault"),
    "sum of all logits": (partial(climb, loss=lambda z, y: z.sum()), "loop_at_fault"),
    "FGSM": ("foolbox:LinfFastGradientAttack(random_start=False)", "weaker_kind"),
    "few queries": ("robust_ext:Square(queries=10)", "weaker_kind"),
}
SOUND = {
    "PGD of 7 steps": partial(climb, steps=7, step=0.25),
    "MI-FGSM": partial(climb, steps=10, step=0.25, momentum=lambda v, g: v + g),
    "restarts": best_of,
    "Foolbox": "foolbox:LinfPGD(steps=40, rel_stepsize=0.1)",
    "DeepFool": "foolbox:LinfDeepFoolAttack(steps=50)",
}


def compared(attack):
    """A diagnosis by the samples alone."""
    return robust_ext.diagnose(digits_network(), attack, INPUTS, LABELS, LINF, planted=0)


@pytest.mark.parametrize("name", FAULTY)
def test_an_attack_that_a_reference_beats_has_a_finding(name):
    attack, code = FAULTY[name]
    result = compared(attack)
    found = {one.code: one for one in result.findings}
    assert code in found
    assert found.keys().isdisjoint({"loop_at_fault", "weaker_kind"} - {code})
    # What others find by the same gradients is no sign that these mislead.
    assert found.keys().isdisjoint({"gradient_free_wins", "transfer_wins"})
    (remedy,) = found[code].remedies
    lowest = min(result.content["references"], key=lambda one: one["robust_accuracy"])
    assert robust_ext.as_attack(remedy.attack)
    assert lowest["robust_accuracy"] < result.content["attacks"][0]["robust_accuracy"]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_attack_is_beaten_by_chance_only(name):
    assert compared(SOUND[name]).likely is None


class Shattered(nn.Module):
    """Gradients of the image upside down: they mislead every attack that follows them."""

    def forward(self, x):
        other = 3 * x.flip(-2).roll(3, -1)
        return x.detach() + (other - other.detach())


def test_gradients_that_mislead_all_are_not_the_loops_fault():
    network = nn.Sequential(OrderedDict(align=Shattered(), network=digits_network())).eval()
    result = robust_ext.diagnose(network, partial(climb, steps=20), INPUTS, LABELS, LINF, planted=0, queries=400)
    assert result.likely.code == "wrong_gradient"
    assert "loop_at_fault" not in {one.code for one in result.findings}


WRONG = {
    "flat where it should climb": lambda z, y: F.relu(margin(z, y)).sum(),
    "logit of the label": lambda z, y: z.gather(1, y[:, None]).sum(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_changes_nothing_on_the_model_is_not_confirmed(name):
    result = robust_ext.diagnose(
        digits_network(), partial(climb, loss=WRONG[name]), INPUTS, LABELS, LINF, try_remedies=True, **FEW
    )
    for entry in result.content["tried"]:
        before, after = entry["before"], entry["after"]
        solved = [
            count * (share(now) - share(then))
            for count, share, then, now in (
                (32, lambda one: 1 - one["robust_accuracy"], before, after),
                (6, lambda one: one["score"], before, after),
            )
        ]
        assert (entry["outcome"] in ("confirmed", "finds more")) == (sum(solved) >= 5)
    views = [one for one in result.content["tried"] if "temperature" in one["remedy"]["view"]]
    assert all(one["outcome"] == "changes nothing" for one in views)
    assert not result.content["reason"].startswith("The confirmed") or result.likely.code not in COMPARISONS


def rounded():
    return convolutional(quantise=Rounding(faulty=True))


HELPED = {
    "rounding, by a library": (rounded, "foolbox:LinfPGD(steps=4, rel_stepsize=0.4)", {"bpda": "net.quantise"}),
    "large logits": (partial(scaled, 1000), "foolbox:LinfPGD(steps=4, rel_stepsize=0.4)", {"temperature": 1000.0}),
}


@pytest.mark.parametrize("name", HELPED)
def test_references_run_through_the_view_that_helps(name):
    make, attack, view = HELPED[name]
    result = robust_ext.diagnose(make(), attack, INPUTS, LABELS, LINF, try_remedies=True, **FEW)
    entry = next(one for one in result.content["tried"] if one["confirmed"])
    assert result.content["reason"].startswith("The confirmed cause")
    through = next(one for one in entry["beside"] if "through" in one["name"])
    reference = AdaptedAttack(attack=APGD(steps=25, loss="margin"), **view)
    alone = robust_ext.robust_accuracy(make(), {through["name"]: reference}, INPUTS, LABELS, LINF)
    assert through["robust_accuracy"] == alone.robust_accuracy(LINF.epsilon)
    best = min(entry["beside"], key=lambda one: one["robust_accuracy"])
    lower = best["robust_accuracy"] < entry["after"]["robust_accuracy"]
    assert (best["text"] in result.content["next"][0]["command"].replace("\\'", "'")) == lower


@pytest.mark.parametrize(
    ("view", "outcome"),
    [
        ({"temperature": 1.5}, "changes nothing"),
        ({"one_by_one": True}, "changes nothing"),
        ({"noise": 30.0}, "worse"),
        ({"aimed": True}, "worse"),
    ],
)
def test_what_makes_a_sound_attack_worse_is_said(view, outcome):
    attack = robust_ext.as_attack(partial(climb, step=0.2))
    data = {"sample_ids": range(16), "batch_size": 16}
    given = prepare_inputs(digits_network(), INPUTS[:16], LABELS[:16], threat_model=LINF, **data)
    examiner = Examiner(given=given, settings=DiagnosisSettings(planted=4, inner_points=50), out=None, worker=run_task)
    trials = Trials(
        attacks={attack.name: attack},
        examination=Examination(examiner=examiner, attacks={attack.name: examiner.examine(attack)}),
        in_eval_mode=lambda: None,
    )
    finding = Finding(code="flat_loss", cause="Flat.", attack=attack.name, remedies=(Remedy(words="Do.", view=view),))
    (entry,) = trials.run([finding])
    assert (entry["outcome"], entry["confirmed"], entry["beside"]) == (outcome, False, [])


REMEDIES = tuple(
    Remedy(words=f"Do {name}.", view={"temperature": value}) for name, value in zip("abcd", (2.0, 3, 4, 5), strict=True)
)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({}, "abcd"),
        ({"a": "changes nothing"}, "bcda"),
        ({"a": "worse", "b": "changes nothing"}, "cdba"),
        ({"a": "worse", "b": "within noise", "d": "confirmed"}, "dcba"),
        ({"a": "raised", "b": "worse", "c": "finds more"}, "cdba"),
    ],
)
@pytest.mark.parametrize("name", ["mine", None])
def test_what_did_not_help_stands_last(outcomes, expected, name):
    tried = [
        {"attack": "mine", "outcome": outcome, "remedy": REMEDIES["abcd".index(letter)].to_dict()}
        for letter, outcome in outcomes.items()
    ]
    finding = Finding(code="saturated_loss", cause="Flat.", attack=name, remedies=REMEDIES)
    (found,) = reordered([finding], tried, {"mine": APGD()})
    assert "".join(one.words[3] for one in found.remedies) == expected
    advice = reports.remedy(found.to_dict()).lower()
    bad = [letter for letter, outcome in outcomes.items() if outcome in ("worse", "changes nothing", "raised")]
    assert not any(f"do {letter}" in advice for letter in bad)
    assert Finding.from_dict(found.to_dict()) == found
