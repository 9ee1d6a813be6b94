"""Modules whose settings and buffers are declared: what the constructor checks, sets, documents and describes."""

import json
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, WrongCallError
from robust_ext.core.modules import SettingsModule, buffer, given, module_class, plain, positional
from robust_ext.core.settings import setting


@module_class
class Scale(SettingsModule):
    """Multiplies what a network returns.

    Attributes:
        doubled: Twice the factor.

    Example:
        >>> 1 + 1
        2
    """

    network: nn.Module = positional("From inputs to outputs.", kw_only=False)
    factor: float = setting(default=2.0, help="Of the outputs.", above=0)
    layers: Sequence[str] = setting(default=(), help="Names.")
    after: Callable[[Tensor], Tensor] = given("Applied last.", default_factory=nn.Identity)
    means: Tensor = buffer("Of the data, int64 ``(F,)``.", dtype=torch.int64)

    def __post_init__(self):
        super().__post_init__()
        self.doubled = 2 * self.factor

    def forward(self, x):
        return self.after(self.factor * self.network(x))


@module_class
class Tenfold(Scale):
    """Another default."""

    factor: float = setting(default=10.0)


def test_the_constructor_checks_settings_and_registers_parts():
    network = nn.Linear(2, 2)
    made = Scale(network, factor=torch.tensor(3), layers=["1"])
    assert (made.factor, type(made.factor), made.doubled, made.settings) == (3, float, 6, made.settings)
    assert made.settings == json.loads(json.dumps(made.settings)) == {"factor": 3.0, "layers": ["1"]}
    assert dict(made.named_children()) == {"network": network, "after": made.after}
    assert set(made.state_dict()) == {"means", "network.weight", "network.bias"}
    assert (made.means.shape, made.means.dtype) == ((0,), torch.int64)
    assert torch.equal(made(torch.ones(1, 2)), 3 * network(torch.ones(1, 2)))
    assert Scale(network).after is not Scale(network).after
    made.means = torch.ones(4)
    assert made.double().state_dict()["means"].dtype == torch.float64
    assert hash(made) != hash(Scale(network, factor=3))
    with pytest.raises(InvalidArgumentError, match=r"factor: got 0, expected a finite number in \(0, 1e\+09\]"):
        Scale(network, factor=0)
    for wrong in ({"means": torch.ones(1)}, {"width": 1}):
        with pytest.raises(WrongCallError, match="with keywords of "):
            Scale(network, **wrong)
    with pytest.raises(WrongCallError, match=r"expected Scale.*factor=3"):
        Scale(network, 3)


def test_a_subclass_may_have_another_default_and_else_the_same_declaration():
    made = Tenfold(nn.Identity())
    assert (made.factor, made.doubled, list(made.settings)) == (10, 20, ["factor", "layers"])
    assert "factor: Of the outputs." in (Tenfold.__doc__ or "")
    with pytest.raises(InvalidArgumentError, match="factor: got -1"):
        Tenfold(nn.Identity(), factor=-1)


def test_the_docstring_has_arguments_and_buffers():
    text = Scale.__doc__ or ""
    wanted = ["Args:", "network: From", "after: Applied", "factor: Of", "layers: Names.", "Attributes:", "means: Of"]
    places = [text.index(each) for each in (*wanted, "doubled: Twice", "Example:")]
    assert places == sorted(places)
    assert text.count("Attributes:") == text.count("means:") == 1


def test_plain_values_are_those_of_json():
    assert plain({"a": (1, [(2.0, None)]), "b": {"c": ("x",)}}) == {"a": [1, [[2.0, None]]], "b": {"c": ["x"]}}
