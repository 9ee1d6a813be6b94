"""What holds for every defense of the catalogue, and for those that share something."""

import pytest
import torch

from robust_ext import BPDA, InvalidArgumentError, ModelError
from robust_ext.core.settings import declared
from robust_ext.core.target import PassCounter, count_calls
from robust_ext.defenses.catalogue import NAMED, TRAINED
from tests.defenses.cases import GROUPED, SHAPE, data, gradient, make, network, quick, seeds

ALL = pytest.mark.parametrize("name", NAMED)
# Rows forward and backward through the classifier for a row, by default and for k steps.
COUNTS = {
    "hd": ((21, 20), lambda k: (k + 1, k)),
    "anti-adversary": ((4, 2), lambda k: (k + 2, k)),
    "imf": ((2, 1), lambda k: (k + 1, k)),
    "aid": ((11, 10), lambda k: (k + 1, k)),
    "soap": ((133, 110), lambda k: (22 * (k + 1) + 1, 22 * k)),
    "clc": ((6, 0), lambda k: (k + 1, 0)),
    "adp": ((10, 0), lambda k: (10, 0)),
    # The encoder is on the classifier's own features: four views a step.
    "reverse": ((161, 160), lambda k: (4 * k + 1, 4 * k)),
    "sodef": ((1, 0), lambda k: (1, 0)),
}


@ALL
def test_building_blocks_are_those_of_its_properties(name):
    blocks = NAMED[name].building_blocks
    assert (NAMED[name].training_class is not None) == (name in TRAINED)
    assert ("IP" in blocks) != ("MA" in blocks)
    assert ("R" in blocks) == NAMED[name].random
    # Settings of other defenses are refused; ranges are checked with those of all settings, in core.
    if name not in ("sodef", "median"):
        with pytest.raises(InvalidArgumentError, match="bounds: got"):
            NAMED[name](*[network()] * (2 if name in TRAINED else 1), bounds=(1, 0))
    if name not in GROUPED:
        with pytest.raises(InvalidArgumentError, match="group_size: got 2"):
            quick(name, group_size=2)


@pytest.mark.parametrize("name", COUNTS)
def test_passes_are_those_that_are_documented(name):
    grouped = {"group_size": 3} if name in GROUPED else {}
    grouped |= {"solver": "rk4"} if name == "sodef" else {}
    by_default, of_steps = COUNTS[name]
    for settings, wanted in (({}, by_default), ({"steps": 3}, of_steps(3))):
        defense, counter = make(name, torch.float32, **grouped, **settings), PassCounter()
        with count_calls(defense.classifier, counter), torch.no_grad():
            defense(data(3, torch.float32))
        assert (counter.forward, counter.backward) == (3 * wanted[0], 3 * wanted[1])


@ALL
def test_the_callers_mode_changes_nothing_and_nothing_is_left_behind(name):
    defense, x = quick(name), data(4)
    expected = defense.trace(x, seeds=seeds(4))
    before = torch.get_rng_state()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            trace = defense.trace(data(4), seeds=seeds(4))
        torch.testing.assert_close(trace.logits, expected.logits)
        assert not any(t.requires_grad for t in (trace.logits, *trace.iterates, *trace.state.values()))
    assert torch.equal(torch.get_rng_state(), before)
    leaf = x.clone().requires_grad_()
    with defense.seeded(1):
        torch.autograd.grad(BPDA(defense)(leaf).sum(), leaf)
        torch.autograd.backward(BPDA(defense, backward="unrolled")(leaf).sum())
        torch.autograd.grad(defense(leaf).sum(), leaf)
    assert all(parameter.grad is None for parameter in defense.parameters())
    assert torch.equal(x, data(4))
    assert all(not part._forward_pre_hooks and not part._forward_hooks for part in defense.modules())


@ALL
def test_rows_or_groups_are_on_their_own(name):
    defense, x = quick(name), data(4)
    whole = defense.trace(x, seeds=seeds(4))
    size = defense.group_size or 1
    for start in range(0, 4, size):
        rows = slice(start, start + size)
        alone = defense.trace(x[rows], seeds=seeds(4)[rows])
        torch.testing.assert_close(alone.final, whole.final[rows])
        torch.testing.assert_close(alone.logits, whole.logits[rows])
    assert len(whole.iterates) == (1 if name in ("sodef", "resize-pad") else defense.steps + (name != "clc"))
    assert torch.equal(whole.iterates[-1], whole.final) or name == "clc"
    if name in GROUPED:
        mixed = defense.trace(x[[0, 3]], seeds=seeds(4)[[0, 3]])
        assert not torch.allclose(mixed.logits[0], whole.logits[0], rtol=0, atol=1e-12)
        with pytest.raises(ModelError, match="batch of 3 rows, expected a whole number of groups of 2"):
            defense(x[:3])
        assert quick(name, pad=True)(x[:3]).shape == (3, 4)


@ALL
def test_no_row_and_one_row_and_draws_that_repeat_with_their_seed(name):
    defense = quick(name, **({"group_size": 2, "pad": True} if name in GROUPED else {}))
    for rows in (0, 1):
        leaf = data(rows).requires_grad_()
        for module in (defense, BPDA(defense, backward="unrolled"), BPDA(defense)):
            out = module(leaf)
            assert out.shape == (rows, 4)
            assert torch.autograd.grad(out.sum(), leaf)[0].shape == (rows, *SHAPE)
        assert defense.trace(data(rows)).final.shape == (rows, *SHAPE)
    # Many steps of the hedge defense end in the same corners from wherever they start; votes are often the same.
    defense, x = quick(name, **{"hd": {"steps": 1}, "randomized-smoothing": {"vote": "mean"}}.get(name, {})), data(4)
    for fixed in (True, False):
        with torch.no_grad(), defense.seeded(2, fixed=fixed):
            assert torch.equal(defense(x), defense(x)) == (fixed or not defense.random)


@ALL
@pytest.mark.parametrize("bounds", [(-1.0, 3.0), (0.0, 255.0)])
def test_other_bounds_are_the_same_stretched(name, bounds):
    x, width = data(4), bounds[1] - bounds[0]
    unit = quick(name).trace(x, seeds=seeds(4))
    other = quick(name, bounds=bounds).trace(bounds[0] + width * x, seeds=seeds(4))
    for one, two in zip(unit.iterates, other.iterates, strict=True):
        torch.testing.assert_close((two - bounds[0]) / width, one, rtol=0, atol=1e-6 if name == "jpeg" else 1e-9)
    torch.testing.assert_close(other.logits, unit.logits, rtol=1e-5, atol=1e-6)
    if name != "jpeg":
        # Half precision stays.
        trace = quick(name, torch.bfloat16, bounds).trace(bounds[0] + width * data(2, torch.float32))
        assert {point.dtype for point in trace.iterates} == {torch.bfloat16}
        assert bool(torch.isfinite(trace.logits).all())


@pytest.mark.parametrize("name", [name for name in NAMED if "checkpoint" in declared(NAMED[name])])
def test_checkpoints_change_no_gradient(name):
    x, weights, found = data(4), torch.ones(4, 4, dtype=torch.float64), []
    for checkpoint in (False, True):
        defense = quick(name, checkpoint=checkpoint)
        with defense.seeded(5):
            found.append(gradient(defense, x, weights))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", TRAINED)
def test_training_depends_on_its_seed_alone(name):
    net, x, labels = network(torch.float32), data(20, torch.float32), torch.arange(20) % 4
    kept = [parameter.clone() for parameter in net.parameters()]
    quickly = {"epochs": 1, "batch_size": 8}
    quickly |= {"layers": ("5",), "attack_steps": 1} if name == "aid" else {}
    cases = [{**quickly, "seed": seed} for seed in (0, 0, 1)]
    if name == "clc":
        cases = [{"layers": layers} for layers in (("4",), ("4",), ("1",))]
    before = torch.get_rng_state()
    parts = [NAMED[name].training_class(**settings).fit(net, x, labels).state_dict() for settings in cases]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(parts[0][key], value) for key, value in parts[1].items())
    assert any(not value.equal(parts[0][key]) for key, value in parts[2].items() if value.is_floating_point())
    assert not any(value.requires_grad for value in parts[0].values())
    assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    for settings, inputs in ((cases[0], x[:1]), (cases[0], 2 * x)):
        with pytest.raises(InvalidArgumentError, match="inputs: got"):
            NAMED[name].training_class(**settings).fit(net, inputs, labels[: len(inputs)])
