"""Settings declared once: what is checked, documented, named and kept, and how a wrong call is answered."""

import dataclasses
import importlib
import json
import math
import pkgutil
import types
import typing
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import robust_ext
from robust_ext import BPDA, BinarizationSettings, EoT, RobustExtError, ThreatModel
from robust_ext.attacks.apgd import APGD
from robust_ext.core.errors import InvalidArgumentError, WrongCallError
from robust_ext.core.modules import SettingsModule, buffer, given, module_class, positional
from robust_ext.core.settings import (
    LARGEST,
    Settings,
    check_setting,
    declared,
    default_of,
    setting,
    setting_types,
    settings_class,
)

for module in pkgutil.walk_packages(robust_ext.__path__, "robust_ext."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)


def even(value):
    if not isinstance(value, int) or value % 2:
        raise InvalidArgumentError("pairs", value, "an even integer")
    return value


@settings_class
class Search(Settings):
    """Looks for something."""

    steps: int = setting(default=10, help="Steps taken.", minimum=1, maximum=99, trial=3, art="max_iter", foolbox=None)
    rate: float = setting(default=0.5, help="Of change.", above=0, below=1)
    share: float | None = setting(default=None, help="Of rows.", minimum=0, maximum=1)
    loss: str = setting(default="ce", help="What is raised.", choices=("ce", "margin"))
    best: bool = setting(default=False, help="Whether to keep the best.")
    widths: tuple[float, ...] | None = setting(default=None, help="Of windows.", above=0)
    names: Sequence[str] = setting(default=("ce",), help="Of losses.", choices=("ce", "margin"))
    pairs: int = setting(default=2, help="Of points.", check=even)
    anything: object = setting(default=None, help="Left as it is.")


OUTSIDE = [
    ("steps", (0, 100, 1.5, True, "3", None), "an integer of at least 1 and at most 99"),
    ("rate", (0, 1, -1, math.nan, math.inf, "half", True, None), r"a finite number in \(0, 1\)"),
    ("share", (-0.1, 1.1), r"a finite number in \[0, 1\]"),
    ("loss", ("dlr", 3, None), "one of 'ce', 'margin'"),
    ("best", (1, "yes", None), "True or False"),
    ("widths", ((1.0, 0), (math.nan,)), "a finite number"),
    ("widths", (3, "abc"), "a tuple of numbers"),
    ("names", (("ce", "dlr"),), "one of 'ce', 'margin'"),
    ("names", ("ce",), "a tuple of some of ce, margin"),
    ("pairs", (3, "2"), "an even integer"),
]


def test_values_outside_what_is_declared_are_refused_and_those_inside_taken_as_their_type():
    for name, values, expected in OUTSIDE:
        for value in values:
            with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*expected {expected}"):
                Search(**{name: value})
    chosen = Search(steps=torch.tensor(7), rate=torch.tensor(0.25), share=1, widths=[1, 2], names=["margin"], pairs=4)
    assert (chosen.steps, chosen.rate, chosen.share, chosen.pairs) == (7, 0.25, 1.0, 4)
    assert (type(chosen.steps), type(chosen.share)) == (int, float)
    assert (chosen.widths, chosen.names, chosen.best) == ((1.0, 2.0), ("margin",), False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.steps = 3
    with pytest.raises(InvalidArgumentError, match="steps: got 0"):
        dataclasses.replace(chosen, steps=0)


def test_the_description_holds_every_setting_and_no_address():
    shown = repr(Search(steps=3, anything=torch.zeros(2, 3)))
    assert shown.startswith("Search(steps=3, rate=0.5, share=None, loss='ce', best=False, widths=None, ")
    assert shown.endswith("anything=tensor of shape (2, 3))")
    assert Search(anything=even).description.endswith(f"anything={__name__}.even)")
    assert "0x" not in Search(anything=torch.nn.Identity()).description
    assert Search(anything=Search(steps=4)).description.endswith(f"anything={Search(steps=4).description})")


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


def test_the_constructor_of_a_module_checks_settings_registers_parts_and_documents_them():
    network = nn.Linear(2, 2)
    made = Scale(network, factor=torch.tensor(3), layers=["1"])
    assert (made.factor, type(made.factor), made.doubled) == (3, float, 6)
    assert made.settings == json.loads(json.dumps(made.settings)) == {"factor": 3.0, "layers": ["1"]}
    assert dict(made.named_children()) == {"network": network, "after": made.after}
    assert set(made.state_dict()) == {"means", "network.weight", "network.bias"}
    assert (made.means.shape, made.means.dtype) == ((0,), torch.int64)
    assert torch.equal(made(torch.ones(1, 2)), 3 * network(torch.ones(1, 2)))
    assert Scale(network).after is not Scale(network).after
    made.means = torch.ones(4)
    assert made.double().state_dict()["means"].dtype == torch.float64
    with pytest.raises(InvalidArgumentError, match=r"factor: got 0, expected a finite number in \(0, 1e\+09\]"):
        Scale(network, factor=0)
    for wrong in ({"means": torch.ones(1)}, {"width": 1}):
        with pytest.raises(WrongCallError, match="with keywords of "):
            Scale(network, **wrong)
    made = Tenfold(nn.Identity())
    assert (made.factor, made.doubled, list(made.settings)) == (10, 20, ["factor", "layers"])
    assert "factor: Of the outputs." in Tenfold.__doc__
    wanted = ["Args:", "network: From", "after: Applied", "factor: Of", "layers: Names.", "Attributes:", "means: Of"]
    places = [Scale.__doc__.index(each) for each in (*wanted, "doubled: Twice", "Example:")]
    assert places == sorted(places)


FLAT, SHOWN = nn.Flatten(), "Flatten(start_dim=1, end_dim=-1)"
MEANT = {
    "ThreatModel(norm='linf', epsilon=0.2)": lambda: ThreatModel("linf", 0.2),
    "ThreatModel(norm='l2', epsilon=1.0, bounds=(0, 255))": lambda: ThreatModel("l2", eps=1.0, clip_values=(0, 255)),
    "ThreatModel(norm=..., epsilon=0.2)": lambda: ThreatModel(epsilon=0.2),
    "ThreatModel(norm='l2', epsilon=0.2)": lambda: ThreatModel(p="l2", Epsilon=0.2),
    "APGD(steps=10)": lambda: APGD(10),
    "APGD(steps=10, restarts=2)": lambda: APGD(n_iter=10, n_restarts=2),
    "BinarizationSettings(threat_model=": lambda: BinarizationSettings(ThreatModel(norm="linf", epsilon=0.1)),
    "Scale(network=Identity(), factor=3)": lambda: Scale(nn.Identity(), 3),
    f"EoT(module={SHOWN}, draws=3, chunk=5)": lambda: EoT(FLAT, 5, n_samples=3),
    f"EoT(module={SHOWN}, draws=...)": lambda: EoT(FLAT),
    f"EoT(module={SHOWN}, draws=2)": lambda: EoT(model=FLAT, draws=2),
    f"BPDA(forward={SHOWN}, layer='quantise')": lambda: BPDA(FLAT, layr="quantise"),
    f"BPDA(forward={SHOWN})": lambda: BPDA(FLAT, forward=FLAT),
}
UNKNOWN = [
    ({"eps": 0.1}, "; state epsilon in the threat model: ThreatModel(norm=..., epsilon=...)"),
    ({"clip_values": (0, 1)}, "; state bounds in the threat model: ThreatModel(norm=..., epsilon=..., bounds=...)"),
    ({"inner_pts": 20}, "; did you mean inner_points or inner?"),
    ({"nothing_like_it": 1}, ""),
]


def test_the_call_that_was_meant_is_named():
    for meant, call in MEANT.items():
        with pytest.raises(WrongCallError) as raised:
            call()
        assert meant in str(raised.value).partition(", expected ")[2]
        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, RobustExtError)
    for keyword, words in UNKNOWN:
        ball = ThreatModel(norm="linf", epsilon=0.1)
        with pytest.raises(InvalidArgumentError) as raised:
            robust_ext.binarization_test(FLAT, APGD(), torch.rand(2, 1, 2, 2), ball, **keyword)
        assert str(raised.value).endswith(words) if words else ";" not in str(raised.value)


def below(cls):
    return {cls, *(one for child in cls.__subclasses__() for one in below(child))}


DECLARED = [
    pytest.param(cls, name, id=f"{cls.__module__.removeprefix('robust_ext.')}.{cls.__name__}.{name}")
    for base in (Settings, SettingsModule)
    for cls in sorted(below(base), key=lambda one: (one.__module__, one.__qualname__))
    if cls.__module__.startswith("robust_ext.")
    for name in declared(cls)
]


def kinds_of(cls, name):
    """The plain types of a setting, those of its entries where it is a tuple, and whether it is one."""
    annotation = setting_types(cls)[name]
    kinds = set(typing.get_args(annotation)) if isinstance(annotation, types.UnionType) else {annotation}
    sequences = [kind for kind in kinds if typing.get_origin(kind) in (tuple, Sequence)]
    return ({typing.get_args(sequences[0])[0]}, True) if sequences else (kinds - {types.NoneType}, False)


def outside(info, kinds):
    """Values that no setting of these types and ends may have."""
    if info.check is not None:
        return [object()]
    if bool in kinds:
        return ["no", 2, 0.5]
    if kinds & {int, float}:
        low = info.minimum if info.above is None else info.above
        high = info.maximum if info.below is None else info.below
        low, high = -LARGEST if low is None else low, LARGEST if high is None else high
        step = 1 if float not in kinds else max(abs(high), 1) * 1e-6
        wrong = [math.nan, math.inf, -math.inf, 1e300, -1e300, low - step, high + step, True, [1]]
        wrong += [low] if info.above is not None else []
        return wrong + ([high] if info.below is not None else []) + ([1.5] if float not in kinds else [])
    if kinds == {str}:
        return [3, b"x", ["a"], *(["no such choice"] if info.choices else [])]
    return []


@pytest.mark.parametrize(("cls", "name"), DECLARED)
def test_what_lies_outside_the_range_of_any_setting_of_the_project_is_refused(cls, name):
    info, default = declared(cls)[name], default_of(cls, name)
    kinds, several = kinds_of(cls, name)
    if default is not None and not hasattr(default, "__dataclass_fields__") and "MISSING" not in repr(default):
        check_setting(cls, name, info, default)
    # A name of a layer in a list may be empty: the input.
    empty = [""] if str in kinds and info.check is None and not several else []
    for value in [*outside(info, kinds), *empty]:
        with pytest.raises(InvalidArgumentError) as raised:
            check_setting(cls, name, info, (value,) if several and info.check is None else value)
        assert raised.value.argument.startswith(name)
