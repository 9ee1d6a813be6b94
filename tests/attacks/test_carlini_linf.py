"""The linf attack of Carlini and Wagner: closed forms, and what it promises of points, rows and passes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from robust_ext.attacks.carlini_linf import CarliniWagnerLinf
from robust_ext.core.threat import ThreatModel
from tests.attacks import problems
from tests.attacks.problems import MADE, Lambda, Linear, Rowwise, images, predicted

# Few, short searches, for what does not hang on how near the points are.
SHORT = MADE["CarliniWagnerLinf"].to_dict()
# Small steps and finely spaced limits, for how near they come; few constants, as that takes long.
CLOSE = {**SHORT, "steps": 100, "learning_rate": 0.005, "initial_const": 0.02, "decrease_factor": 0.95}


def network_of(values, bounds=(0.0, 1.0)):
    return Rowwise(values, 4, bounds, gain=3, centre=0.5)


def search(module, x, y, *, bounds=(0.0, 1.0), classes=4, targeted=False, **chosen):
    threat_model = ThreatModel(norm="linf", epsilon=0.1, bounds=bounds)
    given = {"module": module, "classes": classes, "targeted": targeted}
    return problems.search(CarliniWagnerLinf(**chosen), x, y, threat_model, **given)


def distances(out, x):
    return (out.double() - x.double()).abs().flatten(1).amax(1)


@pytest.mark.parametrize(("low", "width"), [(0.0, 1.0), (-3.0, 8.0)])
@pytest.mark.parametrize("label", [0, 1])
def test_distance_to_a_plane_from_points_at_the_bounds_is_the_closed_form(low, width, label):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(1, 4, 5, generator=generator, dtype=torch.float64) * (2 * label - 1)
    x = torch.randint(0, 2, (3, 1, 4, 5), generator=generator).float() * width + low
    along = (x.double() * weight).flatten(1).sum(1)
    module, y = Linear(weight, float(along.min()) - 1.5 * width), torch.full((3,), label)
    if not label:
        module.threshold = float(along.max()) + 1.5 * width
    found = search(module, x, y, bounds=(low, low + width), classes=2, **CLOSE).out
    assert bool((predicted(module, found) != y).all())
    for row in range(3):
        # Values with positive weights can go down, the others up: the smallest move of them all that is enough.
        room = torch.where((weight > 0) == bool(label), x[row].double() - low, low + width - x[row].double())
        margin = abs(float(along[row]) - module.threshold)
        nearest = brentq(lambda r, room=room, m=margin: m - float((weight.abs() * room.clamp_max(r)).sum()), 0, width)
        assert nearest * (1 - 1e-5) <= float(distances(found, x)[row]) <= nearest * 1.06


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    bounds=st.sampled_from([(0.0, 1.0), (-3.0, 1.5), (0.1, 0.7)]),
    targeted=st.booleans(),
    steps=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=8)
def test_returns_the_nearest_that_it_queried_and_never_leaves_the_bounds(shape, bounds, targeted, steps, seed):
    x, module = images(3, shape, bounds, seed), network_of(math.prod(shape), bounds)
    x.view(3, -1)[0, 0], x.view(3, -1)[1, 0] = lowest, highest = torch.tensor(bounds)
    y, before, chosen = module(x).argsort(1)[:, 2 if targeted else 3], x.clone(), {**SHORT, "steps": steps}
    out, passes, seen = search(module, x, y, bounds=bounds, targeted=targeted, **chosen)
    assert torch.equal(x, before)
    assert passes.forward == passes.backward <= 3 * len(seen)
    assert len(seen) <= seen[0].total == CarliniWagnerLinf(**chosen).most_steps
    for row in range(3):
        kept, nearest = x[row], math.inf
        for step in seen:
            point = step.points[row]
            assert lowest <= point.min() <= point.max() <= highest
            won = (int(predicted(module, point[None])) == int(y[row])) == targeted
            distance = float((point - x[row]).abs().max())
            if won and distance < nearest:
                kept, nearest = point, distance
        assert torch.equal(out[row], kept)


def test_misclassified_rows_and_stubborn_targets_end_at_the_input():
    x, module = images(4, (3, 3), (-0.3, 0.9)), network_of(9, (-0.3, 0.9))
    out, passes, _ = search(module, x, (predicted(module, x) + 1) % 4, bounds=(-0.3, 0.9))
    assert torch.equal(out, x)
    assert (passes.forward, passes.backward) == (4, 4)
    stubborn = Lambda(lambda x: torch.tensor([[5.0, 0.0, 0.0, 0.0]]) + 0 * x.flatten(1).sum(1, keepdim=True))
    out, passes, _ = search(stubborn, x.abs(), torch.zeros(4, dtype=torch.int64), **SHORT)
    assert torch.equal(out, x.abs())
    # A search without progress ends at its second look.
    assert passes.forward < 4 * (2 * 10 * (1 + math.ceil(math.log(20 / 0.05, 8))) + 1)


@pytest.mark.parametrize("targeted", [False, True])
def test_confidence_is_the_least_margin(targeted):
    x, module = images(4, (4, 4)), network_of(16)
    y = module(x).argsort(1)[:, 2 if targeted else 3]
    near = search(module, x, y, targeted=targeted, **SHORT).out
    # Finished rows are left out.
    assert module.sizes[1:] == sorted(module.sizes[1:], reverse=True)
    assert module.sizes[-1] < 4
    assert bool(((predicted(module, near) == y) == targeted).all())
    far = search(module, x, y, targeted=targeted, **{**SHORT, "confidence": 0.7}).out
    for row, logits in enumerate(module(far).tolist()):
        own = logits.pop(int(y[row]))
        assert (own - max(logits) if targeted else max(logits) - own) >= 0.7 - 1e-6
    assert bool((distances(far, x) > distances(near, x)).all())
