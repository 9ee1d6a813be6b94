"""Adapted attacks: other gradients on whatever is attacked, the values it has, and each queried row counted once."""

import pytest
import torch
from torch import nn

from robust_ext import (
    EoT,
    InvalidArgumentError,
    Purifier,
    ThreatModel,
    as_attack,
    binarization_test,
    robust_accuracy,
)
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.random import stream
from robust_ext.core.target import Counted, PassCounter, Target, count_calls
from robust_ext.datasets.load import load_dataset
from robust_ext.defenses.hd import HedgeDefense
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector
from robust_ext.engine.code_digest import attack_code
from robust_ext.evaluations.mead.suites import load_suite
from robust_ext.models.defended import Defended

LINF = ThreatModel(norm="linf", epsilon=0.3)


class Quantise(nn.Module):
    def forward(self, x):
        return (x * 8).round() / 8


class Rounded(nn.Module):
    """The digits' network behind eight levels."""

    def __init__(self):
        super().__init__()
        self.quantise = Quantise()
        self.net = digits_network()

    def forward(self, x):
        return self.net(self.quantise(x))


def pgd(model, x, y, epsilon):
    points = x.clone()
    for _ in range(15):
        points.requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(points), y), points)
        points = points.detach() + epsilon / 5 * gradient.sign()
        points = (x + (points - x).clamp(-epsilon, epsilon)).clamp(0, 1)
    return points


ATTACKS = {
    "foolbox": "foolbox:LinfPGD(steps=15, rel_stepsize=0.1)",
    "art": "art:ProjectedGradientDescent(max_iter=15)",
    "torchattacks": "torchattacks:PGD(steps=15, alpha=0.05)",
    "adv-lib": "adv_lib:pgd_linf(steps=15, relative_step_size=0.2)",
    "own": "robust_ext:APGD(steps=15)",
    "function": pgd,
}


QUICK = ("foolbox", "function")


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(attack, id=name, marks=() if name in QUICK else pytest.mark.exhaustive)
        for name, attack in ATTACKS.items()
    ],
)
def test_attacks_of_any_library_get_through_a_layer_by_its_name(attack):
    inputs, labels = load_dataset("digits").take(range(20))
    made = as_attack(attack)
    adapted = AdaptedAttack(attack=made, bpda="quantise").named("adapted")
    through = AdaptedAttack(attack=made, gradient_mode="straight_through").named("through")
    result = robust_accuracy(Rounded().eval(), [made, adapted, through], inputs, labels, LINF)
    scores = [result.robust_accuracy(0.3, attack=name) for name in (made.name, "adapted", "through")]
    assert scores[0] >= 0.7
    assert max(scores[1:]) <= 0.15
    passes = [one["passes"] for one in result.content["attacks"]]
    assert passes[0] == passes[1] == passes[2] or attack == ATTACKS["art"]


@pytest.mark.parametrize("batching", [pytest.param("full", marks=pytest.mark.exhaustive), "any"])
def test_the_same_attack_is_tested(batching):
    inputs, _ = load_dataset("digits").take(range(8))
    found = as_attack(pgd)
    found.traits = found.traits.__class__(batching=batching)
    adapted = AdaptedAttack(attack=found, bpda="quantise", eot=2)
    small = {"inner_points": 60, "random_inner": 20, "random_corners": 20, "canaries": 2}
    model = ThreatModel(norm="linf", epsilon=0.1)
    result = binarization_test(Rounded().eval(), [found, adapted], inputs, model, kappa=0.9, **small)
    plain, other = result.content["attacks"]
    assert (plain["score"] <= 0.2, other["score"] >= 0.8) == (True, True)
    assert (plain["samples"], plain["passes"]) == (other["samples"], other["passes"])


def target_of(module, shape=(1, 8, 8), classes=10, **more):
    return Target(module=module, bounds=(0, 1), classes=classes, input_shape=shape, device=torch.device("cpu"), **more)


def run(attack, target, inputs, labels, model=LINF):
    return attack.search(target, inputs, labels, threat_model=model, generator=stream(0, "adapted"))


class Keeping:
    """An attack that keeps the module it is given, and does ``steps`` forward and backward passes."""

    def __init__(self, steps=3):
        self.steps = steps
        self.logits, self.gradients = [], []

    def __call__(self, model, x, y):
        with torch.no_grad():
            self.logits.append(model(x))
        for _ in range(self.steps):
            x = x.clone().requires_grad_()
            out = model(x)
            self.logits.append(out.detach())
            self.gradients.append(torch.autograd.grad(nn.functional.cross_entropy(out, y, reduction="sum"), x)[0])
        return x.detach()


def adapted(steps=3, **settings):
    keeping = Keeping(steps)
    return keeping, AdaptedAttack(attack=as_attack(keeping, name="keeping"), **settings)


VIEWS = {
    "layer": {"bpda": "quantise"},
    "straight through": {"gradient_mode": "straight_through"},
    "draws": {"eot": 3, "bpda": "quantise"},
    "noise": {"eot": 3, "noise": 0.5},
    "temperature": {"temperature": 7.0, "bpda": "quantise"},
    "all": {"temperature": 7.0, "bpda": "quantise", "eot": 2, "noise": 0.1},
}


@pytest.mark.parametrize("counting", ["inside", "calls"])
@pytest.mark.parametrize("settings", VIEWS.values(), ids=VIEWS)
def test_values_are_the_models_and_every_query_is_seen_and_counted_once(settings, counting):
    inputs, labels = load_dataset("digits").take(range(5))
    network, counter = Rounded().eval(), PassCounter()
    module = nn.Sequential(Counted(network, counter)) if counting == "inside" else network
    keeping, attack = adapted(**settings)
    seen, before = [], {name: dict(vars(part)) for name, part in module.named_modules()}
    handle = module.register_forward_hook(lambda _, args, out: seen.append((args[0].detach().clone(), out.detach())))
    if counting == "calls":
        with count_calls(network, counter):
            run(attack, target_of(module, counter=counter), inputs, labels)
    else:
        run(attack, target_of(module, counter=counter), inputs, labels)
    handle.remove()
    assert (counter.forward, counter.backward) == (20, 15)
    assert [len(points) for points, _ in seen] == [5] * 4
    with torch.no_grad():
        expected = network(inputs) / settings.get("temperature", 1)
    for logits, (points, out) in zip(keeping.logits, seen, strict=True):
        torch.testing.assert_close(logits, expected)
        assert torch.equal(logits, out)
        assert torch.equal(points, inputs)
    blocked = {"bpda", "gradient_mode"}.isdisjoint(settings)
    assert all(bool(gradient.flatten(1).any(1).all()) for gradient in keeping.gradients) != blocked
    assert before == {name: dict(vars(part)) for name, part in module.named_modules()}


@pytest.mark.parametrize("mode", ["plain", "identity", "trajectory", "straight_through"])
def test_queries_of_a_test_time_defense_are_seen(mode):
    inputs, labels = load_dataset("digits").take(range(4))
    defense, seen = HedgeDefense(digits_network(), steps=1), []
    defense.register_forward_hook(lambda _, args, out: seen.append(len(args[0])))
    keeping, attack = adapted(gradient_mode=mode, eot=2)
    run(attack, target_of(defense), inputs, labels)
    assert seen == [4] * 4
    assert keeping.gradients[0].any()


class Still(Purifier):
    def step(self, point, *, x, number, state, rng):
        return point


def test_a_layer_of_a_defense():
    inputs, labels = load_dataset("digits").take(range(4))
    defense = Still(Rounded().eval(), steps=1)
    keeping, attack = adapted(bpda="quantise", gradient_mode="trajectory")
    run(attack, target_of(defense), inputs, labels)
    other, direct = adapted(bpda="quantise")
    run(direct, target_of(defense.classifier), inputs, labels)
    torch.testing.assert_close(keeping.gradients, other.gradients)


class Unsure(Detector):
    def score_of(self, observed):
        first, second = observed.logits.topk(2).values.unbind(1)
        return second - first


def test_a_layer_beneath_a_detector():
    inputs, labels = load_dataset("digits").take(range(6))
    network = Rounded().eval()
    detector = Unsure(network)
    detector.calibrate(inputs, false_positive_rate=0.2)
    defended = Defended(network, detector)
    plain = as_attack("robust_ext:SelectivePGD(steps=5)")
    found = {}
    for name, attack in {"plain": plain, "adapted": AdaptedAttack(attack=plain, bpda="quantise")}.items():
        out = run(attack, target_of(network, defended=defended), inputs, labels)
        found[name] = int((network(out).argmax(1) != labels).sum())
    assert found["plain"] < found["adapted"]
    refused = AdaptedAttack(attack=plain, eot=2).refusal(threat_model=LINF, detector=True)
    assert "queries classifier and detector apart" in refused


class Wavy(nn.Module):
    """Rises with every value; its slope is 1 + 2 cos(200 x), of either sign."""

    def forward(self, x):
        total = (x + (200 * x).sin() / 100).sum(1)
        return torch.stack([-total, total], 1)


def test_noise_finds_the_slope_behind_shattered_gradients():
    inputs, labels = torch.rand(1, 200, generator=stream(1, "wavy")), torch.zeros(1, dtype=torch.int64)
    model = ThreatModel(norm="linf", epsilon=0.1)
    signs = {}
    for noise, draws in ((0.0, 2), (1.0, 64)):
        keeping, attack = adapted(noise=noise, eot=draws)
        run(attack, target_of(Wavy(), (200,), 2), inputs, labels, model)
        signs[noise] = float((keeping.gradients[0] > 0).float().mean())
    assert 0.5 < signs[0.0] < 0.8
    assert signs[1.0] == 1.0


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.net = digits_network()
        self.factor = factor

    def forward(self, x):
        return self.factor * self.net(x)


def test_a_temperature_takes_a_scale_back():
    inputs, labels = load_dataset("digits").take(range(4))
    (saturated, plain), (warmed, attack) = adapted(eot=1, bpda="net"), adapted(temperature=1e4)
    with pytest.raises(Exception, match="identity has no gradient"):
        run(plain, target_of(Scaled(1e4)), inputs, labels)
    assert not saturated.gradients
    run(attack, target_of(Scaled(1e4)), inputs, labels)
    other, direct = adapted(eot=2)
    run(direct, target_of(Scaled(1.0)), inputs, labels)
    torch.testing.assert_close(warmed.gradients[0], other.gradients[0], rtol=1e-3, atol=1e-6)


class Blurred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = digits_network()

    def forward(self, x):
        return self.net(x + 0.1 * torch.randn_like(x))


def test_draws_of_a_random_model_are_averaged():
    inputs, labels = load_dataset("digits").take(range(4))
    expected = EoT(Blurred(), draws=1000, chunk=100, seed=5)(inputs)
    off = {}
    for draws in (2, 50):
        keeping, attack = adapted(1, eot=draws)
        run(attack, target_of(Blurred()), inputs, labels)
        off[draws] = float((torch.stack(keeping.logits) - expected).square().mean())
    assert off[50] < off[2] / 8


def test_attacks_in_text(tmp_path):
    made = as_attack("robust_ext:AdaptedAttack(attack='foolbox:LinfPGD(steps=7)', bpda='net.quantise', eot=8)")
    assert (made.bpda, made.eot) == ("net.quantise", 8)
    assert "attack=Foolbox LinfProjectedGradientDescentAttack(" in made.description
    assert "steps=7" in made.description
    assert (made.traits.batching, made.traits.gradients) == ("full", True)
    assert AdaptedAttack(**made.to_dict()).name == "foolbox:LinfPGD(steps=7) through BPDA net.quantise, EoT 8"
    file = tmp_path / "mine.py"
    file.write_text("def attack(model, x, y):\n    return x\n")
    text = f"robust_ext:AdaptedAttack(attack='{file}:attack', bpda='{{}}')"
    first, again, other = (attack_code(as_attack(text.format(name))) for name in ("a", "a", "b"))
    assert first == again != other
    file.write_text("def attack(model, x, y):\n    return -x\n")
    assert attack_code(as_attack(text.format("a")))["mine.py"] != first["mine.py"]
    with pytest.raises(InvalidArgumentError, match="did you mean LinfPGD"):
        as_attack("robust_ext:AdaptedAttack(attack='foolbox:LinfPDG()')")


def test_code_inside_a_suite_needs_to_be_allowed(tmp_path):
    suite = tmp_path / "suite.toml"
    suite.write_text('[[arms]]\nattack = "robust_ext:AdaptedAttack(attack=\'mine.py:attack\')"\nnorm = "linf"\n')
    with pytest.raises(InvalidArgumentError, match=r"'mine\.py:attack', which is code"):
        load_suite(str(suite))
