"""Functions that depend on how many rows they are given at once."""

import pytest
import torch

import robust_ext
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.threat import ThreatModel
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import binarization_test

L2 = ThreatModel(norm="l2", epsilon=0.6)


def descent(scaled, *, length=0.003):
    """Steps along what a function makes of gradients of single rows ``(N, ...)``."""

    def attack(model, x, y, epsilon):
        x_adv = x
        for _ in range(30):
            x_adv = x_adv.detach().requires_grad_()
            logits = model(x_adv)
            lead = logits.gather(1, 1 - y[:, None]) - logits.gather(1, y[:, None])
            (gradient,) = torch.autograd.grad(lead.sum(), x_adv)
            moved = x_adv + length * scaled(gradient) - x
            away = moved.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
            x_adv = (x + moved * (epsilon / away).clamp(max=1)).clamp(0, 1)
        return x_adv.detach()

    return attack


def by_row(g):
    return 50 * g / g.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("attack", "found"),
    [
        (descent(lambda g: g / len(g)), True),
        (descent(lambda g: g / len(g) ** 2, length=0.02), True),
        (descent(lambda g: g / g.norm(), length=0.1), True),
        (descent(lambda g: g / g.abs().sum(), length=1.0), True),
        (descent(lambda g: g), False),
        (descent(by_row), False),
        (descent(lambda g: g.sign()), False),
        # The rows of a batch share a length, and it is enough for all sizes.
        (descent(lambda g: 400 * g / g.norm()), False),
    ],
)
def test_who_depends_on_the_batch(attack, found, digits):
    result = binarization_test(
        digits_network(), attack, digits[:16], L2, batch_size=8, depths=(1,), inner_points=100, canaries=0
    )
    assert result.content["attacks"][0]["score"] == 1
    assert [one["code"] for one in result.content["findings"]] == ["batch_size_matters"] * found


def steps_of(library, scaled, length=0.003):
    """A user's class of a library."""
    steps = descent(scaled, length=length)
    if library == "foolbox":
        foolbox = pytest.importorskip("foolbox")

        class Mine(foolbox.attacks.L2PGD):
            def run(self, model, inputs, criterion, *, epsilon, **settings):
                return type(inputs)(steps(model, inputs.raw, criterion.labels.raw, epsilon))

        return Mine()
    if library == "torchattacks":
        torchattacks = pytest.importorskip("torchattacks")

        class Other(torchattacks.PGDL2):
            def forward(self, images, labels):
                return steps(self.get_logits, images, labels, self.eps)

        return Other
    evasion = pytest.importorskip("art.attacks.evasion")

    class Third(evasion.FastGradientMethod):
        def generate(self, x, y=None, **settings):
            model, x, y = self.estimator.model, torch.from_numpy(x), torch.from_numpy(y).argmax(1)
            return steps(model, x, y, self.eps).numpy()

    return Third


class Own(Attack):
    """A class of a user's."""

    name, traits = "Own", AttackTraits(batching="full")

    def __init__(self, scaled, length=0.003):
        self.steps = descent(scaled, length=length)

    def search(self, target, inputs, labels, *, threat_model, generator):
        return self.steps(target.module, inputs, labels, threat_model.epsilon)


def seldom(model, x, y, epsilon, generator):
    """Rows that are solved nine times of ten, whatever their number."""
    tried = torch.rand(len(x), generator=generator) < 0.97
    return torch.where(tried.view(-1, 1, 1, 1), descent(by_row)(model, x, y, epsilon), x)


def small_only(model, x, y, epsilon):
    """It works up to eight rows, and there by their number."""
    if len(x) > 8:
        raise ValueError("too many rows")
    return descent(lambda g: g * (1 + 1 / len(g)))(model, x, y, epsilon)


@pytest.mark.parametrize(
    ("attack", "found"),
    [
        (lambda: small_only, False),
        (lambda: Own(lambda g: g / len(g)), True),
        (lambda: Own(lambda g: g / g.norm(), length=0.1), True),
        (lambda: Own(lambda g: g / len(g) ** 2, length=0.02), True),
        (lambda: AdaptedAttack(attack=Own(lambda g: g / len(g)), keep_best=True), True),
        (lambda: steps_of("foolbox", lambda g: g / len(g)), True),
        (lambda: steps_of("art", lambda g: g / g.norm(), length=0.06), True),
        (lambda: steps_of("torchattacks", lambda g: g / len(g)), True),
        (lambda: steps_of("foolbox", lambda g: g), False),
        (lambda: steps_of("art", by_row), False),
        (lambda: steps_of("torchattacks", lambda g: g * (0.5 + torch.rand(len(g), 1, 1, 1))), False),
        (lambda: Own(lambda g: g), False),
        (lambda: seldom, False),
        (lambda: "foolbox:LinfPGD(steps=30)", False),
        (lambda: "art:ProjectedGradientDescent(max_iter=30, batch_size=1)", False),
        (lambda: "torchattacks:PGD(steps=30)", False),
        (lambda: "adv_lib:pgd_linf(steps=30)", False),
    ],
)
def test_attacks_of_libraries_and_classes(attack, found, digits):
    made = attack()
    threat_model = ThreatModel(norm="linf", epsilon=0.1) if isinstance(made, str) else L2
    options = {"batch_size": 8, "depths": (1,), "inner_points": 100, "canaries": 0}
    result = robust_ext.binarization_test(digits_network(), made, digits[:16], threat_model, **options)
    assert result.content["attacks"][0]["score"] >= 0.8
    assert [one["code"] for one in result.content["findings"]] == ["batch_size_matters"] * found
