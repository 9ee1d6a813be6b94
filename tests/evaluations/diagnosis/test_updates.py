"""Attacks that are run: updates that do not follow the gradients, points that are not those returned, rounding.

And sound ones like them, by hand and of every library.
"""

from functools import partial

import pytest
import torch

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks.base import CallableAttack
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.task import Task, run_task
from robust_ext.engine.verify import verify
from robust_ext.evaluations.causes.indicators import find_attack_faults, most_likely
from tests.evaluations.subjects import gradient, into_ball

EPSILON = 0.1
NAMED = ("off_gradient", "other_points", "restricted", "vanishing_steps")


def faults_of(attack, *, scale=1.0, count=16):
    """What is found from what an attack leaves of some samples, in the norm it is made for."""
    norm = "linf" if isinstance(attack, CallableAttack) else attack.traits.norms[0]
    limit = ThreatModel(norm=norm, epsilon=scale * {"linf": EPSILON, "l2": 0.6, "l1": 2.0}[norm])
    network, counter = digits_network().requires_grad_(False), PassCounter()
    inputs, labels = load_dataset("digits").take(range(count))
    target = Target(
        module=Counted(network, counter),
        bounds=limit.bounds,
        classes=10,
        input_shape=tuple(inputs.shape[1:]),
        device=inputs.device,
        counter=counter,
    )
    given = {"inputs": inputs, "labels": labels, "threat_model": limit}
    result = run_task(Task(attack=attack, target=target, stream=(0, attack.name), **given))
    found = verify(result.candidates, inputs, labels, module=network, threat_model=limit, attack=attack.name)
    right = network(inputs).argmax(1) == labels
    keys = ("outcome", "distance", "trace", "correct")
    rows = zip(found.outcomes, found.distances.tolist(), result.trace.rows(), right.tolist(), strict=True)
    left = [{**dict(zip(keys, row, strict=True)), "canary": None} for row in rows]
    return find_attack_faults("own", attack, left, threat_model=limit)


ball = partial(into_ball, epsilon=EPSILON)


def mask(like):
    return (torch.arange(8) < 4).float()[:, None].expand_as(like)


def loop(change, *, steps=40, look=lambda x: x, end=lambda x: x):
    """Steps that ``change(gradient, memory)`` makes, in epsilons; gradients are those at ``look(points)``."""

    def attack(model, x, y):
        points, memory = x, {}
        for _ in range(steps):
            slope = gradient(lambda x: model(look(x)), points, y)
            points = end(ball(points + EPSILON * change(slope, memory), x))
        return points

    return attack


def momentum(slope, memory):
    """One that adds up gradients, times a mask."""
    slope = slope / slope.abs().sum((1, 2, 3), keepdim=True).clamp_min(1e-30)
    memory["velocity"] = slope + memory.get("velocity", 0)
    return 0.1 * mask(slope) * memory["velocity"].sign()


def signs(size, times=torch.ones_like):
    return lambda slope, memory: size * slope.sign() * times(slope)


def on_grid(model, x, y):
    """Steps of two levels from an image of 8 bits, and as many of its projection."""
    image = (x * 255).round() / 255
    points = image
    for _ in range(40):
        points = into_ball(points + 2 / 255 * gradient(model, points, y).sign(), image, 25 / 255)
    return ball(points, x)


DRAWS = torch.Generator().manual_seed(0)
FAULTS = {
    "gradients of other rows": (loop(lambda slope, memory: 0.1 * slope.roll(1, 0).sign()), "off_gradient"),
    "to [0, 255]": (loop(signs(0.1), look=lambda x: 255 * x), "other_points"),
    "16 levels": (loop(signs(0.1), end=lambda x: (x * 15).round() / 15), "vanishing_steps"),
    "the upper half": (loop(signs(0.1, mask)), "restricted"),
    "momentum times a mask": (loop(momentum), "restricted"),
    "one step, times a mask": (loop(signs(1, mask), steps=1), "restricted"),
}


def rounded_at_the_end(model, x, y):
    found = loop(signs(0.1))(model, x, y)
    return torch.where(found > x, (found * 255).floor(), (found * 255).ceil()) / 255


def returned_where_it_succeeds(model, x, y):
    found = loop(signs(1), steps=1)(model, x, y)
    return torch.where((model(found).argmax(1) != y).view(-1, 1, 1, 1), found, x)


SOUND = {
    "gradients that are dropped here and there": loop(
        signs(0.1, lambda slope: torch.rand(slope.shape, generator=DRAWS) < 0.5)
    ),
    "levels of 8 bits, kept by its steps": on_grid,
    "8 bits at the end": rounded_at_the_end,
    "one step, returned where it succeeds": returned_where_it_succeeds,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_update_is_named_first(name):
    function, code = FAULTS[name]
    found = faults_of(CallableAttack(function, name="own"))
    assert most_likely(found).code == code
    assert found[0].remedies


@pytest.mark.parametrize("name", SOUND)
def test_sound_updates_like_them_are_silent(name):
    found = faults_of(CallableAttack(SOUND[name], name="own"))
    assert [one.code for one in found if one.weight == "high"] == []


# Attacks that move in their own way, and those that leave samples unsolved where none can be found, or their kind finds
# none, and are sound.
OWN_WAY = [
    "torchattacks:MIFGSM(steps=20)", "torchattacks:NIFGSM(steps=20)", "torchattacks:SINIFGSM(steps=20)",
    "torchattacks:VMIFGSM(steps=20)", "torchattacks:DIFGSM(steps=20)", "torchattacks:EOTPGD(steps=20)",
    "torchattacks:APGDT(steps=20)", "torchattacks:Jitter(steps=20)", "torchattacks:PGDRSL2(steps=20)",
    "foolbox:L1PGD(steps=40)", "foolbox:SparseL1DescentAttack(steps=40)", "foolbox:L2AdamPGD(steps=40)",
    "adv_lib:apgd(n_iter=50)",
]  # fmt: skip
OF_LIBRARIES = [
    "foolbox:LinfPGD", "foolbox:L2FastGradientAttack", "foolbox:LinfDeepFoolAttack", "foolbox:DDNAttack",
    "foolbox:L2CarliniWagnerAttack(binary_search_steps=3, steps=60)", "foolbox:LInfFMNAttack(steps=50)",
    "foolbox:HopSkipJumpAttack(steps=2, initial_gradient_eval_steps=10, max_gradient_eval_steps=30)",
    "art:AutoProjectedGradientDescent(max_iter=30, nb_random_init=1)", "art:SquareAttack(max_iter=100)",
    "art:MomentumIterativeMethod(max_iter=30)", "torchattacks:PGD(steps=40)", "torchattacks:APGD(steps=50)",
    "torchattacks:FAB(steps=20)", "adv_lib:pgd_linf", "adv_lib:alma(num_steps=200)", "adv_lib:fmn",
    "robust_ext:APGD", "robust_ext:RayS", "robust_ext:RandomSearch", "robust_ext:LinearRegion(budget=300)",
]  # fmt: skip


@pytest.mark.parametrize("text", [*OWN_WAY, *OF_LIBRARIES])
def test_sound_attacks_of_libraries(text):
    assert {one.code for one in faults_of(as_attack(text))}.isdisjoint(NAMED)
    if text in OF_LIBRARIES:
        # Of a budget in which they leave many samples.
        found = faults_of(as_attack(text), scale=0.3, count=24)
        assert [(one.code, one.evidence) for one in found if one.weight != "low"] == []
