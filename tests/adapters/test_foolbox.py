"""Foolbox's objects and models, and what Foolbox 3.3.4 does wrong: raises, zeros and NaN for single rows."""

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from robust_ext import InvalidArgumentError, ThreatModel, as_attack, as_module
from robust_ext.adapters.wrapped import starting_points
from robust_ext.attacks.running import UnitSpace
from robust_ext.core.errors import RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.registry.base import adapters
from tests.adapters import common
from tests.adapters.common import UNIT, Brightness, Recorder, conv_network, predicted, require, uniform

foolbox = require("foolbox")
NeverFlat = common.import_module("robust_ext.adapters.foolbox.target").NeverFlat

SHAPE = (1, 6, 6)
NETWORK, X = conv_network((1, 10, 10)), uniform(6, (1, 10, 10))
Y = predicted(NETWORK, X)
HOPS = {"steps": 2, "initial_gradient_eval_steps": 10, "max_gradient_eval_steps": 20}
SEARCH = {"binary_search_steps": 4, "steps": 50, "initial_const": 1.0}
START = foolbox.attacks.LinearSearchContrastReductionAttack(distance=foolbox.distances.l2, target=1.0, steps=10)


class Constant(nn.Module):
    """Class 0 with gradients of zero in row 0, :class:`Brightness` in the others."""

    def __init__(self):
        super().__init__()
        self.others = Brightness(0.45)
        self.eval()

    def forward(self, x):
        logits = self.others(x)
        return torch.cat([logits[:1] * 0 + torch.tensor([[3.0, -3.0]]), logits[1:]])


def images(rows=3):
    """Dark images, of mean around .4."""
    return torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(0)) * 0.8


def build(name, settings=None):
    return adapters()["foolbox"].build_attack(name, dict(settings or {}), name=name)


def run(attack, module, x, *, norm, epsilon=0.2, labels=None, direct=False):
    labels = torch.zeros(len(x), dtype=torch.int64) if labels is None else labels
    threat_model = ThreatModel(norm=norm, epsilon=epsilon)
    return common.run(attack, module, x, labels, threat_model, classes=module(x).shape[1], direct=direct)


def host(attack, module, x, criterion, **ways):
    with seeded_globals(common.drawn_seed()):
        return attack(foolbox.PyTorchModel(module, bounds=UNIT, device="cpu"), x.clone(), criterion, **ways)[1]


def test_the_distance_of_an_object_follows_the_threat_model_and_it_stays_as_it_is():
    mine = foolbox.attacks.InversionAttack()
    expected = host(foolbox.attacks.InversionAttack(distance=foolbox.distances.linf), NETWORK, X, Y, epsilons=None)
    found = run(as_attack(mine), NETWORK, X, norm="linf", epsilon=0.1, labels=Y, direct=True)
    assert torch.equal(found, expected)
    assert mine._distance is None


LOST, EASY, HARD = Brightness([0.45, 0.9, 0.45]), Brightness([0.45, 0.1, 0.45]), Brightness([0.45, 5.0, 0.45])
STARTING = [("BoundaryAttack", {"steps": 20}, "l2"), ("HopSkipJumpAttack", HOPS, "l2"), ("PointwiseAttack", {}, "linf")]
# An attack, its settings, what it attacks, a norm, the classes of its candidates, and the row that comes back as it is.
ROWS = [
    # No start is found for row 1, where Foolbox raises for all rows; it is misclassified already.
    *((*case[:2], HARD if case[2] == "linf" else LOST, case[2], [1, 0, 1], 1) for case in STARTING),
    *((*case[:2], EASY, case[2], [1, 1, 1], 1) for case in STARTING),
    # A start that was chosen is used, and may fail.
    *((name, {"steps": 5, "init_attack": START}, HARD, None, [1, 0, 1], 1) for name in ("BoundaryAttack", "LInfFMN")),
    # Failures are images of zeros.
    *((name, SEARCH, HARD, None, [1, 0, 1], 1) for name in ("L2CarliniWagnerAttack", "EADAttack")),
    # Knows no numeric epsilon.
    ("PointwiseAttack", {}, Brightness(0.45), "l1", [1, 1, 1], None),
    # NaN where a gradient vanishes.
    ("NewtonFoolAttack", {}, Constant(), "l2", [0, 1, 1], 0),
    *(
        (f"{norm}BrendelBethgeAttack", {"steps": 5}, Brightness([5.0, 0.45, 0.45]), None, [0, 1, 1], 0)
        for norm in ("Linfinity", "L2", "L1", "L0")
    ),
]


@pytest.mark.usefixtures("uncompiled_brendel_bethge")
@pytest.mark.parametrize(("name", "settings", "module", "norm", "classes", "kept"), ROWS)
def test_a_row_that_is_lost_comes_back_and_the_others_are_found(name, settings, module, norm, classes, kept, recwarn):
    name = name.replace("FMN", "FMNAttack")
    module, x, attack = Recorder(module), images(), build(name, settings)
    starting, norm = (name, settings, norm) in STARTING, norm or attack.traits.norms[0]
    candidates = run(attack, module, x, norm=norm)
    assert predicted(module, candidates).tolist() == classes
    assert [row for row in range(3) if torch.equal(candidates[row], x[row])] == [kept] * (kept is not None)
    assert bool(ThreatModel(norm="l2", epsilon=9.0).contains(candidates, x).all())
    assert set(module.sizes) == {3}
    assert torch.equal(run(build(name, settings), module, x, norm=norm), candidates)
    # Rows without a start are warned of.
    assert not starting or any(one.category is RobustExtWarning for one in recwarn) == (0 in classes)


def test_genattack_does_not_overflow_on_large_logits_and_aims_at_the_likeliest_wrong_class():
    module, x = Brightness(0.45, slope=3000.0), images()
    candidates = run(build("GenAttack", {"steps": 5, "population": 4}), module, x, norm="linf", epsilon=0.01)
    assert bool((module(candidates)[:, 1] > module(x)[:, 1]).all())

    class Three(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0, 0, 0], x[:, 0, 0, 1] + 0.2, x[:, 0, 0, 2]], 1)

    x, settings, module = torch.full((3, *SHAPE), 0.5), {"steps": 5, "population": 4}, Three().eval()
    x[0, 0, 0, 2], x[1, 0, 0, 0], x[2, 0, 0, 0] = 1.0, 1.0, 0.0
    criterion = foolbox.criteria.TargetedMisclassification(torch.tensor([2, 1, 2]))
    expected = host(foolbox.attacks.GenAttack(**settings), module, x, criterion, epsilons=0.3)
    labels = torch.tensor([0, 0, 1])
    assert torch.equal(run(build("GenAttack", settings), module, x, norm="linf", epsilon=0.3, labels=labels), expected)


def test_noise_and_virtual_adversaries_are_in_the_ball_where_foolbox_scales_wrongly_or_divides_by_zero():
    noise = "LinfAdditiveUniformNoiseAttack", {}, Brightness(5.0), images(rows=20) / 4 + 0.3, "linf", 0.1
    virtual = "VirtualAdversarialAttack", {"steps": 1, "xi": 0.01}, Constant(), images(), "l2", 1.0
    for name, settings, module, x, norm, epsilon in (noise, virtual):
        candidates = run(build(name, settings), module, x, norm=norm, epsilon=epsilon)
        assert bool(ThreatModel(norm=norm, epsilon=epsilon).contains(candidates, x).all())
        assert not torch.equal(candidates[1:], x[1:])


def test_foolbox_does_not_configure_the_callers_logging(monkeypatch):
    """It writes to the root logger by functions that add a handler where there is none."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    run(build("BoundaryAttack", {"steps": 2}), Brightness(0.45), images(), norm="l2")
    assert logging.getLogger().handlers == []


@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-15, 1e-8, 1.0, 1e5]), min_size=1, max_size=6), st.sampled_from([2, 4]))
def test_gradients_are_changed_only_where_they_have_vanished(factors, power):
    x, module = torch.ones(len(factors), 3, requires_grad=True), nn.Linear(3, 3)
    module.forward = lambda x: x * torch.tensor(factors)[:, None]
    # A hook left on the caller's tensor would change gradients that are none of the wrapper's.
    order = module, NeverFlat(module, power=power), module
    (own,), (gradient,), (again,) = (torch.autograd.grad(one(x).sum(), x) for one in order)
    assert torch.equal(own, again)
    assert bool((gradient.square().sum(1) ** (power // 2) > 0).all())
    vanished = own.square().sum(1) ** (power // 2) == 0
    assert torch.equal(gradient[~vanished], own[~vanished])


@pytest.mark.parametrize("bounds", [UNIT, (-1.0, 1.0), (0.0, 255.0)])
def test_points_are_adversarial_and_close_to_the_boundary(bounds):
    module, width = Recorder(Brightness(0.5, bounds)), bounds[1] - bounds[0]
    x = uniform(6, (1, 4, 4)) * 0.6 * width + bounds[0]
    labels = module(x).argmax(1)
    module.queries.clear()
    target = common.target_of(module, (1, 4, 4), bounds=bounds, classes=2)
    points, found = starting_points(target, x, labels, generator=torch.Generator().manual_seed(1))
    assert set(module.sizes) == {6}
    assert bool(found.all())
    assert bool((module(points).argmax(1) != labels).all())
    assert bounds[0] <= float(points.min()) < float(points.max()) <= bounds[1]
    # Ten halvings lead within a thousandth of the way to where the mean crosses the middle.
    away = (points.flatten(1).mean(1) - sum(bounds) / 2).abs()
    assert float(away.max()) < 2e-3 * width


@given(st.tuples(st.floats(-300, 300), st.floats(0.01, 500)), st.sampled_from(["linf", "l2", "l1"]), st.integers(0, 99))
def test_points_and_distances_are_stretched(ends, norm, seed):
    bounds, generator = (ends[0], ends[0] + ends[1]), torch.Generator().manual_seed(seed)
    true = ThreatModel(norm=norm, epsilon=0.1, bounds=bounds)
    unit = UnitSpace(common.target_of(nn.Linear(5, 2).eval(), (5,), bounds=bounds, classes=2), true)
    x = (torch.rand(4, 5, generator=generator) * ends[1] + ends[0]).clamp(*bounds)
    entered, moved = unit.enter(x), unit.enter(x)
    assert torch.equal(entered, entered.clamp(0, 1))
    # What is not moved is exactly the input; what is moved by epsilon there is moved by epsilon here.
    assert torch.equal(unit.leave(entered, x), x)
    moved[:, 0] = (moved[:, 0] + unit.threat_model.epsilon).clamp(max=1)
    back = unit.leave(moved, x)
    assert torch.equal(back[:, 1:], x[:, 1:])
    assert torch.equal(back, back.clamp(*bounds))
    assert bool(true.contains(back, x).all())


@pytest.mark.slow
@pytest.mark.exhaustive
def test_brendel_bethge_compiled_is_what_its_python_is(request):
    """The optimizer that numba compiles and the one that the other tests run find the same points."""
    x, module, attack = uniform(4, SHAPE), conv_network(SHAPE, 3), build("L2BrendelBethgeAttack", {"steps": 5})
    compiled = run(attack, module, x, norm="l2", labels=predicted(module, x))
    request.getfixturevalue("uncompiled_brendel_bethge")
    assert not torch.equal(compiled, x)
    python = run(attack, module, x, norm="l2", labels=predicted(module, x))
    torch.testing.assert_close(python, compiled, rtol=0, atol=1e-5)


def wrapped(kind, inner):
    models, preprocessing = foolbox.models, {"mean": [0.3], "std": [0.7], "axis": -3}
    model = foolbox.PyTorchModel(inner, bounds=(0, 1), device="cpu", preprocessing=preprocessing)
    return {
        "plain": lambda: model,
        "transform_bounds": lambda: model.transform_bounds((-1, 1)),
        "TransformBounds": lambda: models.TransformBoundsWrapper(model, (-1, 1)),
        "Thresholding": lambda: models.ThresholdingWrapper(model, 0.5),
        "ExpectationOverTransformation": lambda: models.ExpectationOverTransformationWrapper(model, 3),
    }[kind]()


@pytest.mark.parametrize(
    "kind", ["transform_bounds", "TransformBounds", "plain", "Thresholding", "ExpectationOverTransformation"]
)
def test_modules_return_what_the_models_do_and_copies_have_a_network_of_their_own(kind):
    """PyTorchModel holds its network in a closure, which a copy of the module would go on to call."""
    inner = conv_network((1, 10, 10))
    model = wrapped(kind, inner)
    x = uniform(6, (1, 10, 10), tuple(model.bounds))
    adapted, expected = as_module(model), model(x)
    assert adapted.bounds == tuple(model.bounds)
    assert torch.equal(adapted.module(x), expected)
    assert not torch.allclose(expected, NETWORK(x))
    changed, doubled = copy.deepcopy(adapted.module), copy.deepcopy(adapted.module).double()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()
    assert not changed(x).any()
    # A copy that is moved takes its preprocessing along.
    out = doubled(x.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), expected)
    assert torch.equal(model(x), adapted.module(x))
    # The network is there once, and in the mode of the module around it.
    assert len(list(adapted.module.parameters())) == len(list(inner.parameters()))
    adapted.module.train()
    assert inner.training


def test_other_models_of_foolbox_are_black_boxes_or_refused():
    adapted = as_module(foolbox.NumPyModel(lambda x: 2 * x, bounds=(0, 1)))
    assert adapted.bounds == (0.0, 1.0)
    assert torch.equal(adapted.module(torch.ones(1, 3)), torch.full((1, 3), 2.0))
    with pytest.raises(InvalidArgumentError, match=r"foolbox\.models\.Model"):
        as_module(foolbox.distances.l2)


def test_random_models_stay_random_and_are_averaged():
    class Noisy(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] + torch.randn(len(x), 3)

    model = foolbox.PyTorchModel(Noisy().eval(), bounds=(0, 1), device="cpu")
    module = as_module(foolbox.models.ExpectationOverTransformationWrapper(model, 4)).module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = module(X)
        torch.manual_seed(0)
        torch.testing.assert_close(out, torch.stack([Noisy()(X) for _ in range(4)]).mean(0))
