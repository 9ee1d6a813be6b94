"""The ascents of MEAD: Foolbox's, where Foolbox has them, and what they promise of points, passes and rows."""

import pytest
import torch

from robust_ext.attacks._common.objectives import DIVERGENCES
from robust_ext.attacks._common.rows import project
from robust_ext.attacks.objective_pgd import ALGORITHMS, ObjectivePGD
from robust_ext.core.errors import AttackRefusedError
from robust_ext.core.random import stream
from robust_ext.core.threat import NORMS, ThreatModel
from tests.attacks.problems import predicted, rowwise_problem

BOUNDS = (0.0, 1.0)
NAMES = list(DIVERGENCES)


def attack(parts, threat_model, **chosen):
    given = {name: chosen.pop(name) for name in ("targeted", "watch") if name in chosen}
    return ObjectivePGD(**chosen).search(*parts, threat_model=threat_model, generator=stream(0), **given)


def foolbox_points(name, parts, epsilon, **chosen):
    foolbox = pytest.importorskip("foolbox", reason="Foolbox is not installed")
    target, inputs, labels = parts
    model = foolbox.PyTorchModel(target.module, bounds=BOUNDS, device="cpu")
    return getattr(foolbox.attacks, name)(random_start=False, **chosen).run(model, inputs, labels, epsilon=epsilon)


@pytest.mark.parametrize(
    ("norm", "name", "epsilon", "step"),
    [
        ("linf", "LinfPGD", 0.3, 0.02),
        ("linf", "LinfBasicIterativeAttack", 0.05, 0.01),
        ("l2", "L2PGD", 0.9, 0.05),
        ("l1", "L1PGD", 3.0, 0.3),
    ],
)
@pytest.mark.parametrize("algorithm", ["pgd", "bim"])
def test_cross_entropy_ascends_as_in_foolbox(norm, name, epsilon, step, algorithm):
    """Across the bounds, too."""
    parts = rowwise_problem(rows=8)
    once = foolbox_points("LinfFastGradientAttack", parts, epsilon)
    fgsm = attack(parts, ThreatModel(norm="linf", epsilon=epsilon), algorithm="fgsm")
    torch.testing.assert_close(fgsm, once, rtol=0, atol=1e-7)
    theirs = foolbox_points(name, parts, epsilon, steps=40, abs_stepsize=step)
    chosen = {"algorithm": algorithm, "steps": 40, "step_size": step, "start": "input", "projection": "scaled"}
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    ours = attack(parts, threat_model, **chosen)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)
    assert bool(((ours == 0) | (ours == 1)).any())
    if norm == "linf":
        assert torch.equal(attack(parts, threat_model, **{**chosen, "projection": "nearest"}), ours)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_along_the_gradient_by_finite_differences(name, norm):
    """The first step in the middle of the ball, of length step_size in the norm, along differences of the objective."""
    target, inputs, labels = rowwise_problem(rows=3)
    target.module.double()
    inputs = (0.4 + 0.2 * inputs).double()
    threat_model = ThreatModel(norm=norm, epsilon=0.2)
    seen = []
    attack((target, inputs, labels), threat_model, objective=name, steps=2, step_size=0.01, watch=seen.append)
    points, after = seen[0].points.double(), seen[1].points.double()

    def value(x):
        with torch.no_grad():
            return DIVERGENCES[name].value(target.module(x), target.module(inputs), labels)

    slopes = torch.zeros(3, 24, dtype=torch.float64)
    for place in range(24):
        shift = torch.zeros(1, 24, dtype=torch.float64)
        shift[0, place] = 1e-5
        slopes[:, place] = (value(points + shift.view(1, 2, 3, 4)) - value(points - shift.view(1, 2, 3, 4))) / 2e-5
    order = {"l2": 2, "l1": 1}.get(norm)
    length = slopes.sign() if order is None else slopes / slopes.norm(p=order, dim=1, keepdim=True)
    expected = project(points + 0.01 * length.view(points.shape), inputs, threat_model)
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(seen[0].loss.double(), value(points), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("best", [False, True])
def test_passes_are_the_steps_and_every_query_is_the_batch(name, best):
    target, inputs, labels = rowwise_problem()
    module, counter = target.module.module, target.counter
    module.sizes.clear()
    watched = []
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    found = attack((target, inputs, labels), threat_model, objective=name, steps=9, best=best, watch=watched.append)
    extra = int(DIVERGENCES[name].compares) + int(best)
    assert (counter.forward, counter.backward) == (6 * (9 + extra), 6 * 9)
    assert module.sizes == [6] * (9 + extra)
    assert [(step.number, step.total) for step in watched] == [(number, 9) for number in range(9)]
    assert all(step.gradient is not None and step.gradient.shape == inputs.shape for step in watched)
    if not best:
        # What is returned is the point after the last step.
        assert not torch.equal(found, watched[-1].points)


def test_best_is_the_misclassified_point_of_highest_objective():
    target, inputs, labels = rowwise_problem(rows=20)
    threat_model = ThreatModel(norm="linf", epsilon=0.12)
    # Gini leads to undecided points, on either side of the boundary.
    chosen = {"objective": "gini", "steps": 25, "step_size": 0.05}
    seen = []
    last = attack((target, inputs, labels), threat_model, watch=seen.append, **chosen)
    best = attack((target, inputs, labels), threat_model, best=True, **chosen)
    with torch.no_grad():
        tried = torch.stack([*[step.points for step in seen], last])
        logits = torch.stack([target.module(points) for points in tried])
    values = torch.stack([DIVERGENCES["gini"].value(each, each, labels) for each in logits])
    values = values.where(logits.argmax(2) != labels, -torch.inf)
    rows = torch.arange(20)
    found = values.amax(0) > -torch.inf
    expected = torch.where(found.view(-1, 1, 1, 1), tried[values.argmax(0), rows], last)
    assert torch.equal(best, expected)
    assert 0 < int(found.sum()) < 20
    assert int((predicted(target.module, last) != labels).sum()) < int(found.sum())


def test_aims_lower_cross_entropy_and_the_others_have_none():
    target, inputs, labels = rowwise_problem()
    aims, threat_model = (labels + 1) % 5, ThreatModel(norm="linf", epsilon=0.5)
    found = attack((target, inputs, aims), threat_model, targeted=True, best=True)
    reached = predicted(target.module, found) == aims
    assert int(reached.sum()) >= 4
    for name in NAMES[1:]:
        with pytest.raises(AttackRefusedError, match="choose objective='ace'"):
            attack((target, inputs, aims), threat_model, objective=name, targeted=True)


def test_defaults_are_the_papers():
    def of(norm, epsilon, algorithm, bounds=BOUNDS):
        threat_model, built = ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds), ObjectivePGD(algorithm=algorithm)
        return built.steps_for(threat_model), built.step_size_for(threat_model)

    assert of("l1", 40, "pgd") == (100, 4.0)
    assert of("l2", 0.125, "pgd") == (100, 0.1)
    assert of("linf", 0.5, "pgd") == (100, 0.01)
    linf = (0.03125, 0.0625, 0.125, 0.25, 0.3125, 0.5)
    assert [of("linf", epsilon, "bim") for epsilon in linf] == [(n, 0.01) for n in (10, 20, 40, 80, 100, 160)]
    assert of("linf", 0.001, "bim") == (1, 0.01)
    assert of("linf", 0.25, "fgsm") == (1, 0.25)
    assert of("linf", 8.0, "bim", (0.0, 256.0)) == (10, 2.56)
    built = {(one, name): ObjectivePGD(objective=name, algorithm=one) for one in ALGORITHMS for name in NAMES}
    assert {key for key, each in built.items() if not each.starts_at_random} == {
        (one, name) for one in ("bim", "fgsm") for name in ("ace", "gini")
    }
