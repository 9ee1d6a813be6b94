"""Updates that do not follow the gradients, points that are not those returned, rounding; and sound ones like them."""

from functools import partial

import pytest
import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks.base import CallableAttack
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.causes.indicators import find_attack_faults, most_likely
from tests.evaluations.diagnosis.test_indicators import attacked
from tests.evaluations.steps import gradient, into_ball

EPSILON = 0.1
NAMED = ("off_gradient", "other_points", "restricted", "vanishing_steps")


ball = partial(into_ball, epsilon=EPSILON)


def unit(slope):
    return slope / slope.abs().sum((1, 2, 3), keepdim=True).clamp_min(1e-30)


def start(x):
    return ball(x + EPSILON * (2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) - 1), x)


def mask(like):
    return (torch.arange(8) < 4).float()[:, None].expand_as(like)


def patch(like):
    return mask(like) * mask(like).mT


def loop(change, *, steps=40, begin=torch.clone, look=lambda x: x, end=lambda x: x, project=False):
    """Steps that ``change(gradient, memory)`` makes, in epsilons; gradients are those at ``look(points)``."""

    def attack(model, x, y):
        points, memory = begin(x), {}
        for _ in range(steps):
            slope = gradient(lambda x: model(look(x)), points, y)
            points = end(ball(points + EPSILON * change(slope, memory), x))
            points = ball(points, x) if project else points
        return points

    return attack


def single(change, *, begin=torch.clone):
    """One step, as :func:`loop` makes it."""
    return loop(lambda slope, memory: change(slope), steps=1, begin=begin)


def momentum(decay, kept, step):
    """``kept`` makes the momentum of the old one and a gradient; ``step`` what is stepped along, of the same."""

    def change(slope, memory):
        slope, before = unit(slope), memory.get("velocity", torch.zeros_like(slope))
        memory["velocity"] = kept(decay * before, slope)
        return 0.1 * step(decay * before, slope).sign()

    return change


def signs(size):
    return lambda slope, memory: size * slope.sign()


def adam(slope, memory):
    memory["first"] = 0.9 * memory.get("first", 0) + 0.1 * slope
    memory["second"] = 0.999 * memory.get("second", 0) + 0.001 * slope**2
    return 0.1 * (memory["first"] / 0.1) / ((memory["second"] / 0.001).sqrt() + 1e-12)


def few(slope, memory):
    """The five largest components only."""
    flat = slope.flatten(1)
    chosen = flat.abs().topk(5, 1).indices
    return 0.5 * torch.zeros_like(flat).scatter(1, chosen, flat.gather(1, chosen).sign()).view_as(slope)


def shrinking(slope, memory):
    memory["size"] = 0.8 * memory.get("size", 0.1)
    return memory["size"] * slope.sign()


def late(slope, memory):
    """The gradient of the step before."""
    before, memory["slope"] = memory.get("slope", slope), slope
    return 0.1 * before.sign()


def restarting(model, x, y):
    found = x.clone()
    for seed in range(4):
        away = 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) - 1
        points = ball(x + EPSILON * away, x)
        for _ in range(10):
            points = ball(points + 0.025 * gradient(model, points, y).sign(), x)
        fooled = model(points).argmax(1) != y
        found[fooled] = points[fooled]
    return found


def averaging(noise, draws, step=0.02):
    """The mean gradient over noisy points; without noise, that of several passes at each point."""

    def attack(model, x, y):
        points, draw = x.clone(), torch.Generator().manual_seed(0)
        for _ in range(15):
            slope = 0
            for _ in range(draws):
                slope = slope + gradient(model, points + noise * EPSILON * torch.randn(x.shape, generator=draw), y)
            points = ball(points + step * slope.sign(), x)
        return points

    return attack


def on_grid(model, x, y):
    """Steps of two levels from an image of 8 bits, and as many of its projection."""
    image = (x * 255).round() / 255
    points = image
    for _ in range(40):
        points = into_ball(points + 2 / 255 * gradient(model, points, y).sign(), image, 25 / 255)
    return ball(points, x)


def grey(levels, how=torch.round):
    return lambda x: how(x * levels) / levels


PLUS, MINUS = (lambda old, new: old + new), (lambda old, new: new - old)
MOMENTUM = momentum(1.0, PLUS, PLUS)
DRAWS = torch.Generator().manual_seed(0)
FAULTS = {
    "momentum subtracted": (
        loop(momentum(1.0, PLUS, MINUS)), "off_gradient"
    ),
    "momentum that changes its sign": (
        loop(momentum(1.0, MINUS, MINUS)), "off_gradient"
    ),
    "gradients of other rows": (loop(lambda slope, memory: 0.1 * slope.roll(1, 0).sign()), "off_gradient"),
    "normalised again": (loop(signs(0.1), look=lambda x: (x - 0.5) / 0.25), "other_points"),
    "to [0, 255]": (loop(signs(0.1), look=lambda x: 255 * x), "other_points"),
    "8 bits, steps of a quarter level": (loop(signs(0.01), end=grey(255)), "vanishing_steps"),
    "8 bits, cut off": (loop(signs(0.03), end=grey(255, torch.floor)), "vanishing_steps"),
    "16 levels": (loop(signs(0.1), end=grey(15)), "vanishing_steps"),
    "the upper half": (loop(lambda slope, memory: 0.1 * slope.sign() * mask(slope)), "restricted"),
    "a patch, from a random start in it": (
        loop(lambda slope, memory: 0.1 * slope.sign() * patch(slope), begin=lambda x: x + (start(x) - x) * patch(x)),
        "restricted",
    ),
    "momentum times a mask": (
        loop(lambda slope, memory: mask(slope) * MOMENTUM(slope, memory)), "restricted"
    ),
    "one step, times a mask": (single(lambda slope: slope.sign() * mask(slope)), "restricted"),
    "8 bits out of the ball": (loop(signs(0.1), end=grey(255)), "left_ball"),
    "several gradients at a point, short": (averaging(0.0, 8, step=0.002), "short_path"),
    "steps that get shorter": (loop(shrinking), "short_path"),
}  # fmt: skip
SOUND = {
    "gradients that are dropped here and there": loop(
        lambda slope, memory: 0.1 * slope.sign() * (torch.rand(slope.shape, generator=DRAWS) < 0.5)
    ),
    "signs": loop(signs(0.1)),
    "Adam": loop(adam, steps=60),
    "sparse steps": loop(few, steps=80),
    "the gradient of the step before": loop(late),
    "restarts": restarting,
    "mean over small noise": averaging(0.02, 8),
    "mean over large noise": averaging(0.5, 4),
    "mean over passes": averaging(0.0, 8),
    "levels of 8 bits, kept by its steps": on_grid,
    "8 bits at the end, towards the input": lambda model, x, y: (
        torch.where((found := loop(signs(0.1))(model, x, y)) > x, (found * 255).floor(), (found * 255).ceil()) / 255
    ),
    "a step all along the diagonal": single(torch.sign),
    "one step, returned where it succeeds": lambda model, x, y: torch.where(
        (model(there := single(torch.sign)(model, x, y)).argmax(1) != y).view(-1, 1, 1, 1), there, x
    ),
}


def found(attack, model, norm="linf"):
    limit = ThreatModel(norm=norm, epsilon={"linf": EPSILON, "l2": 0.6, "l1": 2.0}[norm])
    left = attacked(model.requires_grad_(False), attack, limit, count=16)
    return find_attack_faults("own", attack, left, threat_model=limit)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_update_is_named_first(name):
    function, code = FAULTS[name]
    faults = found(CallableAttack(function, name="own"), digits_network())
    assert most_likely(faults).code == code
    assert faults[0].remedies


@pytest.mark.parametrize("name", SOUND)
def test_sound_updates_like_them_are_silent(name):
    faults = found(CallableAttack(SOUND[name], name="own"), digits_network())
    assert [one.code for one in faults if one.weight == "high"] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "text",
    [
        "torchattacks:MIFGSM(steps=20)", "torchattacks:NIFGSM(steps=20)", "torchattacks:SINIFGSM(steps=20)",
        "torchattacks:VMIFGSM(steps=20)", "torchattacks:DIFGSM(steps=20)", "torchattacks:EOTPGD(steps=20)",
        "torchattacks:APGDT(steps=20)", "torchattacks:Jitter(steps=20)", "torchattacks:PGDRSL2(steps=20)",
        "foolbox:L1PGD(steps=40)", "foolbox:SparseL1DescentAttack(steps=40)", "foolbox:L2AdamPGD(steps=40)",
        "art:MomentumIterativeMethod(max_iter=30)", "adv_lib:apgd(n_iter=50)", "robust_ext:LinearRegion(budget=100)",
    ],
)  # fmt: skip
def test_attacks_of_libraries_that_move_in_their_own_way(text):
    attack = as_attack(text)
    assert {one.code for one in found(attack, digits_network(), attack.traits.norms[0])}.isdisjoint(NAMED)
