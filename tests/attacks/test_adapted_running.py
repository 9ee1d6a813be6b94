"""What an adapted attack returns in the place of an attack's own candidates, and what it gives the attack."""

import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, as_attack
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.engine.task import Task, run_task

THREAT_MODEL = ThreatModel(norm="linf", epsilon=0.2)
INPUTS = torch.tensor([[0.3], [0.4], [0.45]])
LABELS = torch.zeros(3, dtype=torch.int64)


class Ramp(nn.Module):
    """Class 1 from x = .5 on."""

    def forward(self, x):
        return torch.cat([0.5 - x, x - 0.5], 1)


def wanders(model, x, y, *, epsilon):
    """Queries the far end of the ball, a point beyond it, and returns the input."""
    model(x + epsilon)
    model(x + 2 * epsilon)
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


def _found(function, **settings):
    attack = as_attack(function)
    attack = AdaptedAttack(attack=attack, **settings) if settings else attack
    counter = PassCounter()
    module = Counted(Ramp().eval(), counter)
    target = Target(module=module, bounds=(0, 1), classes=2, input_shape=(1,), device=INPUTS.device, counter=counter)
    task = Task(
        attack=attack, target=target, inputs=INPUTS, labels=LABELS, threat_model=THREAT_MODEL, stream=(0, "test")
    )
    return run_task(task).candidates


@pytest.mark.parametrize(
    ("function", "settings", "expected"),
    [
        # .3 + .2 is the border itself, where class 0 still wins: no point of the first row is adversarial.
        (wanders, {}, [0.3, 0.4, 0.45]),
        (wanders, {"keep_best": True}, [0.3, 0.6, 0.65]),
        (wanders, {"keep_best": True, "one_by_one": True}, [0.3, 0.6, 0.65]),
        (leaps, {}, [5.3, 5.4, 5.45]),
        (leaps, {"projected": True}, [0.5, 0.6, 0.65]),
        (halves, {}, [0.36, 0.46, 0.51]),
        (halves, {"one_by_one": True}, [0.5, 0.51, 0.51]),
        (aims, {}, [0.1, 0.2, 0.25]),
        (aims, {"aimed": True}, [0.5, 0.6, 0.65]),
    ],
)
def test_candidates(function, settings, expected):
    torch.testing.assert_close(_found(function, **settings)[:, 0], torch.tensor(expected), atol=1.1e-2, rtol=0)


def test_a_batch_in_another_order_is_known_by_where_its_points_lie():
    def some(model, x, y, *, epsilon):
        model(x[[2, 1]] + 0.1)
        return x

    assert _found(some, keep_best=True)[:, 0].tolist() == pytest.approx([0.3, 0.4, 0.55])
