"""Adapted attacks: other gradients on whatever is attacked, the values it has, and each queried row counted once."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from robust_ext import InvalidArgumentError, ThreatModel, as_attack, robust_accuracy
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target, count_calls
from robust_ext.datasets.load import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from robust_ext.engine.task import Task, run_task
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.models.defended import Defended
from tests.attacks.problems import Lambda

LINF = ThreatModel(norm="linf", epsilon=0.3)


def rounded():
    """The digits' network behind a layer."""
    layer = Lambda(lambda x: (x * 8).round() / 8)
    return nn.Sequential(OrderedDict(layer=layer, net=digits_network())).eval()


def digits(count):
    return load_dataset("digits").take(range(count))


ATTACKS = {
    "foolbox": "foolbox:LinfPGD(steps=15, rel_stepsize=0.1)",
    "art": "art:ProjectedGradientDescent(max_iter=15)",
    "torchattacks": "torchattacks:PGD(steps=15, alpha=0.05)",
    "adv-lib": "adv_lib:pgd_linf(steps=15, relative_step_size=0.2)",
    "own": "robust_ext:APGD(steps=15)",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_attacks_of_any_library_get_through_a_layer_by_its_name(attack):
    inputs, labels = digits(20)
    made = as_attack(attack)
    adapted = AdaptedAttack(attack=made, bpda="layer").named("adapted")
    through = AdaptedAttack(attack=made, gradient_mode="straight_through").named("through")
    result = robust_accuracy(rounded(), [made, adapted, through], inputs, labels, LINF)
    scores = [result.robust_accuracy(0.3, attack=name) for name in (made.name, "adapted", "through")]
    assert scores[0] >= 0.7
    assert max(scores[1:]) <= 0.15
    passes = [one["passes"] for one in result.content["attacks"]]
    assert passes[0] == passes[1] == passes[2] or attack == ATTACKS["art"]


def target_of(module, shape=(1, 8, 8), classes=10, **more):
    return Target(module=module, bounds=(0, 1), classes=classes, input_shape=shape, device=torch.device("cpu"), **more)


def run(attack, target, inputs, labels, model=LINF):
    return attack.search(target, inputs, labels, threat_model=model, generator=stream(0, "adapted"))


def kept(target, inputs, labels, **settings):
    """Logits and gradients that an adapted attack saw in a pass forward, and three forward and backward."""
    logits, gradients = [], []

    def keeping(model, x, y):
        with torch.no_grad():
            logits.append(model(x))
        for _ in range(3):
            x = x.clone().requires_grad_()
            out = model(x)
            logits.append(out.detach())
            gradients.append(torch.autograd.grad(nn.functional.cross_entropy(out, y, reduction="sum"), x)[0])
        return x.detach()

    run(AdaptedAttack(attack=as_attack(keeping), **settings), target, inputs, labels)
    return logits, gradients


VIEWS = {
    "layer": {"bpda": "layer"},
    "straight through": {"gradient_mode": "straight_through"},
    "draws": {"eot": 3, "bpda": "layer"},
    "noise": {"eot": 3, "noise": 0.5},
    "temperature": {"temperature": 7.0, "bpda": "layer"},
    "all": {"temperature": 7.0, "bpda": "layer", "eot": 2, "noise": 0.1},
}


@pytest.mark.parametrize("counting", ["inside", "calls"])
@pytest.mark.parametrize("settings", VIEWS.values(), ids=VIEWS)
def test_values_are_the_models_and_every_query_is_seen_and_counted_once(settings, counting):
    inputs, labels = digits(5)
    network, counter, seen = rounded(), PassCounter(), []
    module = nn.Sequential(Counted(network, counter)) if counting == "inside" else network
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    handle = module.register_forward_hook(lambda _, args, out: seen.append((args[0].detach().clone(), out.detach())))
    with count_calls(network, counter if counting == "calls" else PassCounter()):
        found, gradients = kept(target_of(module, counter=counter), inputs, labels, **settings)
    handle.remove()
    assert (counter.forward, counter.backward) == (20, 15)
    assert [len(points) for points, _ in seen] == [5] * 4
    with torch.no_grad():
        expected = network(inputs) / settings.get("temperature", 1)
    for logits, (points, out) in zip(found, seen, strict=True):
        torch.testing.assert_close(logits, expected)
        assert torch.equal(logits, out)
        assert torch.equal(points, inputs)
    blocked = {"bpda", "gradient_mode"}.isdisjoint(settings)
    assert all(bool(gradient.flatten(1).any(1).all()) for gradient in gradients) != blocked
    assert before == {name: dict(vars(part)) for name, part in module.named_modules()}


class Unsure(Detector):
    def score_of(self, observed):
        first, second = observed.logits.topk(2).values.unbind(1)
        return second - first


def test_a_layer_beneath_a_detector():
    (inputs, labels), network, found = digits(6), rounded(), []
    detector = Unsure(network)
    detector.calibrate(inputs, false_positive_rate=0.2)
    target = target_of(network, defended=Defended(network, detector))
    plain = as_attack("robust_ext:SelectivePGD(steps=5)")
    for attack in (plain, AdaptedAttack(attack=plain, bpda="layer")):
        found.append(int((network(run(attack, target, inputs, labels)).argmax(1) != labels).sum()))
    assert found[0] < found[1]
    refused = AdaptedAttack(attack=plain, eot=2).refusal(threat_model=LINF, detector=True)
    assert "queries classifier and detector apart" in refused


def test_noise_finds_the_slope_behind_shattered_gradients():
    def wavy(x):
        """Rises with every value; its slope is 1 + 2 cos(200 x), of either sign."""
        total = (x + (200 * x).sin() / 100).sum(1)
        return torch.stack([-total, total], 1)

    inputs, labels = torch.rand(1, 200, generator=stream(1, "wavy")), torch.zeros(1, dtype=torch.int64)
    target = target_of(Lambda(wavy), (200,), 2)
    narrow, wide = (kept(target, inputs, labels, noise=noise, eot=64)[1] for noise in (0.006, 1.0))
    assert 0.5 < float((narrow[0] > 0).float().mean()) < 0.8
    assert bool((wide[0] > 0).all())


def test_attacks_in_text_whose_code_in_a_suite_needs_to_be_allowed(tmp_path):
    made = as_attack("robust_ext:AdaptedAttack(attack='foolbox:LinfPGD(steps=7)', bpda='net.quantise', eot=8)")
    assert (made.bpda, made.eot, made.traits.batching) == ("net.quantise", 8, "full")
    assert "attack=Foolbox LinfProjectedGradientDescentAttack(" in made.description
    assert AdaptedAttack(**made.to_dict()).name == "foolbox:LinfPGD(steps=7) through BPDA net.quantise, EoT 8"
    file, suite = tmp_path / "mine.py", tmp_path / "suite.toml"
    file.write_text("def attack(model, x, y):\n    return x\n")
    with pytest.raises(InvalidArgumentError, match="did you mean LinfPGD"):
        as_attack("robust_ext:AdaptedAttack(attack='foolbox:LinfPDG()')")
    suite.write_text('[[arms]]\nattack = "robust_ext:AdaptedAttack(attack=\'mine.py:attack\')"\nnorm = "linf"\n')
    with pytest.raises(InvalidArgumentError, match=r"'mine\.py:attack', which is code"):
        load_suite(str(suite))


# What is returned in the place of an attack's own candidates.


def wanders(model, x, y, *, epsilon):
    """Queries the far end of the ball, a point beyond it, and returns the input."""
    model(x + epsilon)
    model(x + 2 * epsilon)
    return x


def reorders(model, x, y, *, epsilon):
    """Queries some rows in another order, and returns the input."""
    model(x[[2, 1]] + 0.1)
    return x


def leaps(model, x, y, *, epsilon):
    """Returns what lies out of ball and bounds."""
    return x + 5


def halves(model, x, y, *, epsilon):
    """Stops for all as soon as one row is fooled."""
    points = x.clone()
    while bool((model(points).argmax(1) == y).all()) and float((points - x).max()) < 0.99 * epsilon:
        points = points + 0.01
    return points


def aims(model, x, y, *, epsilon):
    """Goes towards the class it is given."""
    return x + epsilon * torch.where(y == 1, 1.0, -1.0)[:, None]


@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        # .3 + .2 is the border itself, where class 0 still wins: no point of the first row is adversarial.
        (wanders, {}, [0.3, 0.4, 0.45]),
        (wanders, {"keep_best": True}, [0.3, 0.6, 0.65]),
        (wanders, {"keep_best": True, "one_by_one": True}, [0.3, 0.6, 0.65]),
        (reorders, {"keep_best": True}, [0.3, 0.4, 0.55]),
        (leaps, {}, [5.3, 5.4, 5.45]),
        (leaps, {"projected": True}, [0.5, 0.6, 0.65]),
        (halves, {}, [0.36, 0.46, 0.51]),
        (halves, {"one_by_one": True}, [0.5, 0.51, 0.51]),
        (aims, {}, [0.1, 0.2, 0.25]),
        (aims, {"aimed": True}, [0.5, 0.6, 0.65]),
    ],
)
def test_candidates(function, settings, expected):
    """Of three inputs, where class 1 begins at .5."""
    attack, counter = as_attack(function), PassCounter()
    attack = AdaptedAttack(attack=attack, **settings) if settings else attack
    ramp = Counted(Lambda(lambda x: torch.cat([0.5 - x, x - 0.5], 1)), counter)
    parts = {"inputs": torch.tensor([[0.3], [0.4], [0.45]]), "labels": torch.zeros(3, dtype=torch.int64)}
    parts |= {"threat_model": ThreatModel(norm="linf", epsilon=0.2), "stream": (0, "test")}
    found = run_task(Task(attack=attack, target=target_of(ramp, (1,), 2, counter=counter), **parts)).candidates
    torch.testing.assert_close(found[:, 0], torch.tensor(expected), atol=1.1e-2, rtol=0)
