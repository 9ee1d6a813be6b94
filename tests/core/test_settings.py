"""Settings declared once: what is checked, documented, named and kept."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import Settings, setting, settings_class


def even(value):
    if not isinstance(value, int) or value % 2:
        raise InvalidArgumentError("pairs", value, "an even integer")
    return value


@settings_class
class Search(Settings):
    """Looks for something.

    Example:
        >>> 1 + 1
        2
    """

    steps: int = setting(default=10, help="Steps taken.", minimum=1, maximum=99, trial=3, art="max_iter", foolbox=None)
    rate: float = setting(default=0.5, help="Of change.", above=0, below=1)
    share: float | None = setting(default=None, help="Of rows.", minimum=0, maximum=1)
    loss: str = setting(default="ce", help="What is raised.", choices=("ce", "margin"))
    best: bool = setting(default=False, help="Whether to keep the best.")
    widths: tuple[float, ...] | None = setting(default=None, help="Of windows.", above=0)
    names: Sequence[str] = setting(default=("ce",), help="Of losses.", choices=("ce", "margin"))
    pairs: int = setting(default=2, help="Of points.", check=even)
    anything: object = setting(default=None, help="Left as it is.")


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
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
    ],
)
def test_values_outside_what_is_declared_are_refused(name, values, expected):
    for value in values:
        with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*expected {expected}"):
            Search(**{name: value})


def test_values_inside_are_taken_as_their_type():
    chosen = Search(steps=torch.tensor(7), rate=torch.tensor(0.25), share=1, widths=[1, 2], names=["margin"], pairs=4)
    assert (chosen.steps, chosen.rate, chosen.share, chosen.pairs) == (7, 0.25, 1.0, 4)
    assert (type(chosen.steps), type(chosen.share)) == (int, float)
    assert (chosen.widths, chosen.names, chosen.best) == ((1.0, 2.0), ("margin",), False)
    thing = object()
    assert Search(anything=thing).anything is thing


def test_they_are_frozen_and_by_keyword():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Search().steps = 3
    with pytest.raises(TypeError, match=r"expected Search.steps=3"):
        Search(3)
    assert dataclasses.replace(Search(steps=3), best=True).to_dict() == Search(steps=3, best=True).to_dict()
    with pytest.raises(InvalidArgumentError, match="steps: got 0"):
        dataclasses.replace(Search(), steps=0)


def test_the_description_holds_every_setting_and_no_address():
    shown = repr(Search(steps=3, anything=torch.zeros(2, 3)))
    assert shown == Search(steps=3, anything=torch.zeros(2, 3)).description
    assert shown.startswith("Search(steps=3, rate=0.5, share=None, loss='ce', best=False, widths=None, ")
    assert shown.endswith("anything=tensor of shape (2, 3))")
    assert Search(anything=even).description.endswith(f"anything={__name__}.even)")
    assert "0x" not in Search(anything=torch.nn.Identity()).description
    assert Search(anything=Search(steps=4)).description.endswith(f"anything={Search(steps=4).description})")
