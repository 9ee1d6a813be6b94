import copy

import pytest
import torch
from torch import nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.registry.model import as_module
from tests.adapters.common import conv_network, require, uniform

foolbox = require("foolbox")


def network():
    return conv_network((1, 10, 10))


def batch(bounds):
    return uniform(6, (1, 10, 10), bounds)


def wrapped(kind, inner):
    preprocessing = {"mean": [0.3], "std": [0.7], "axis": -3}
    model = foolbox.PyTorchModel(inner, bounds=(0, 1), device="cpu", preprocessing=preprocessing)
    return {
        "plain": lambda: model,
        "transform_bounds": lambda: model.transform_bounds((-1, 1)),
        "TransformBounds": lambda: foolbox.models.TransformBoundsWrapper(model, (-1, 1)),
        "Thresholding": lambda: foolbox.models.ThresholdingWrapper(model, 0.5),
        "ExpectationOverTransformation": lambda: foolbox.models.ExpectationOverTransformationWrapper(model, 3),
    }[kind]()


KINDS = ["plain", "transform_bounds", "TransformBounds", "Thresholding", "ExpectationOverTransformation"]


def test_the_network_is_reached_once_and_shares_its_mode():
    inner, seen = network(), []
    module = as_module(wrapped("TransformBounds", inner)).module
    assert inner in list(module.modules())
    assert len(list(module.parameters())) == len(list(inner.parameters()))
    with inner[0].register_forward_hook(lambda *_: seen.append(1)):
        module(batch((-1.0, 1.0)))
    assert seen == [1]
    module.train()
    assert inner.training


def test_other_models_of_foolbox_are_black_boxes_or_refused():
    adapted = as_module(foolbox.NumPyModel(lambda x: 2 * x, bounds=(0, 1)))
    assert adapted.bounds == (0.0, 1.0)
    assert torch.equal(adapted.module(torch.ones(1, 3)), torch.full((1, 3), 2.0))
    with pytest.raises(InvalidArgumentError, match=r"foolbox\.models\.Model"):
        as_module(foolbox.distances.l2)


@pytest.mark.parametrize("kind", KINDS)
def test_modules_return_what_the_models_do_and_copies_have_a_network_of_their_own(kind):
    """PyTorchModel holds its network in a closure, which a copy of the module would go on to call."""
    model = wrapped(kind, network())
    x = batch(tuple(model.bounds))
    adapted, expected = as_module(model), model(x)
    assert adapted.bounds == tuple(model.bounds)
    assert torch.equal(adapted.module(x), expected)
    assert not torch.allclose(expected, network()(x))
    changed, doubled = copy.deepcopy(adapted.module), copy.deepcopy(adapted.module).double()
    assert torch.equal(changed(x), expected)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()
    assert not changed(x).any()
    # A copy that is moved takes its preprocessing along.
    out = doubled(x.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), expected)
    assert torch.equal(adapted.module(x), expected)
    assert torch.equal(model(x), expected)


def test_random_models_stay_random_and_are_averaged():
    class Noisy(nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :3] + torch.randn(len(x), 3)

    model = foolbox.PyTorchModel(Noisy().eval(), bounds=(0, 1), device="cpu")
    module = as_module(foolbox.models.ExpectationOverTransformationWrapper(model, 4)).module
    x = batch((0.0, 1.0))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = module(x)
        torch.manual_seed(0)
        by_hand = torch.stack([x.flatten(1)[:, :3] + torch.randn(len(x), 3) for _ in range(4)]).mean(0)
    torch.testing.assert_close(out, by_hand)
