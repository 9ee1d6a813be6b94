"""Settings of other libraries' attacks: what makes no sense is refused, and each library's own defaults are not."""

import inspect
import math
from importlib import import_module

import pytest

from robust_ext.adapters.catalogue import check_ranges
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.registry.attack import as_attack
from tests.adapters.common import LIBRARIES, cases, usable

EVERY = [case for library in LIBRARIES for case in cases(usable(library), library)]
COUNTS = (
    "steps",
    "max_iter",
    "num_steps",
    "n_iter",
    "max_iterations",
    "n_queries",
    "repeats",
    "batch_size",
    "n_restarts",
)
SIZES = ("rel_stepsize", "abs_stepsize", "stepsize", "eps_step", "alpha", "lr", "learning_rate", "eps")


def made_of(library, listing):
    return import_module(f"robust_ext.adapters.{library}.attack").CATALOGUE.find(listing.name)


@pytest.mark.parametrize(("library", "listing"), EVERY)
def test_defaults_pass_and_nonsense_is_refused(library, listing):
    found = made_of(library, listing)
    check_ranges(found, listing.trial)
    for name, parameter in inspect.signature(found).parameters.items():
        default = parameter.default
        if isinstance(default, (bool, int, float, str)):
            check_ranges(found, {name: default})
        wrong = []
        if isinstance(default, bool):
            wrong = ["no", 2, 0.5]
        elif name in COUNTS:
            wrong = [-5, 0, 0.5, True, "many", 10**10]
        elif name in SIZES:
            wrong = [-0.1, 0, math.inf, math.nan, "big", True]
        elif (
            isinstance(default, (int, float))
            and math.isfinite(default)
            and name not in ("norm", "p", "layer", "target", "max_mask_size")
        ):
            wrong = [math.nan, "much"]
        for value in wrong:
            with pytest.raises(InvalidArgumentError, match=name):
                check_ranges(found, {name: value})


@pytest.mark.parametrize(
    "text",
    [
        "art:ProjectedGradientDescent(num_random_init=0, norm='inf', eps=8/255, decay=None)",
        "foolbox:LinfPGD(abs_stepsize=None, random_start=False)",
        "art:FeatureAdversariesPyTorch(layer=-1)",
        "adv_lib:ddn(levels=None)",
        "adv_lib:fmn(norm='linf')",
        "torchattacks:APGD(seed=0, norm='L2')",
    ],
)
def test_what_libraries_mean_by_special_values_stays(text):
    if usable(text.partition(":")[0]):
        as_attack(text)
