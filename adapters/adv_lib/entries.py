"""Data on adv-lib's attacks, measured on version 0.2.8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.adapters.catalogue import AttackEntry
from robust_ext.attacks.base import AttackTraits

_LINF, _L2 = ("linf",), ("l2",)
# Also for attacks that minimise l0: a change of k values within the bounds is at most k widths in l1.
_L1 = ("l1",)
_NO_L1 = ("linf", "l2")


@dataclass(frozen=True, kw_only=True)
class Entry(AttackEntry):
    """The data on a function besides :class:`robust_ext.adapters.catalogue.AttackEntry`.

    The norms of its traits are those it can be set to minimise.

    Args:
        norm: Its parameter for the norm; empty where it has none.
        l0: Whether that parameter may also be 0.
        epsilon: Its parameter for the budget, in units of inputs in [0, 1]; empty where it has none.
        dlr_classes: Fewest classes for ``loss_function="dlr"``; other losses need two.
        subsets: Settings that make it query some of the samples only, when they are above 1 or True.
        random: Settings that make it draw random numbers, when they are set.
        dimensions: How many dimensions a batch must have; 0 for any.
        restore: Whether it may turn a sample that is misclassified already into one that is not.
    """

    norm: str = ""
    l0: bool = False
    epsilon: str = ""
    dlr_classes: int = 2
    subsets: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    dimensions: int = 0
    restore: bool = False


def _minimum(batching: str = "full", **traits: Any) -> AttackTraits:
    settings = {"failure": "input", "seeds": "none", "leaves_ball": True, **traits}
    return AttackTraits(batching=batching, minimum_norm=True, **settings)


_PATIENT = "its default settings take many thousands of passes"

ENTRIES: Mapping[str, Entry] = {
    "alma": Entry(
        traits=_minimum(norms=("l2", "l1"), minimum_classes=3),
        norm="distance",
        random=("init_lr_distance",),
        trial={"num_steps": 20},
    ),
    "apgd": Entry(
        traits=AttackTraits(batching="full", failure="input", minimum_classes=3),
        norm="norm",
        epsilon="eps",
        dlr_classes=3,
        subsets=("n_restarts",),
        trial={"n_iter": 10},
        defect="with best_loss=True it ignores n_iter and makes 100 iterations",
    ),
    "apgd_targeted": Entry(
        traits=AttackTraits(batching="any", failure="input", minimum_classes=4),
        norm="norm",
        epsilon="eps",
        dlr_classes=4,
        restore=True,
        trial={"n_iter": 5},
        defect="a row that is misclassified already is attacked towards its own label too; such rows keep their input",
    ),
    "minimal_apgd": Entry(
        traits=_minimum(seeds="global", minimum_classes=3),
        norm="norm",
        epsilon="max_eps",
        dlr_classes=3,
        subsets=("n_restarts", "targeted_version"),
        trial={"n_iter": 5, "binary_search_steps": 4},
    ),
    "carlini_wagner_l2": Entry(
        traits=_minimum(norms=_L2, batch_dependent=True),
        trial={"binary_search_steps": 3, "max_iterations": 20, "initial_const": 1.0},
        defect=f"fewer than ten max_iterations divide by zero unless abort_early=False; {_PATIENT}",
    ),
    "carlini_wagner_linf": Entry(
        traits=_minimum("single", norms=_LINF, batch_dependent=True),
        trial={"max_iterations": 5, "initial_const": 0.5},
        defect=_PATIENT,
    ),
    "ddn": Entry(
        traits=_minimum(norms=_L2, seeds="global"),
        trial={"steps": 20},
        defect="it rounds its points to 256 grey levels by default, which may miss thin regions; levels=None does not",
    ),
    "df": Entry(traits=_minimum("single", norms=_NO_L1), norm="norm", trial={"steps": 20}),
    "fab": Entry(traits=_minimum(), norm="norm", random=("restarts",), trial={"n_iter": 10}),
    "fga": Entry(traits=_minimum("single", seeds="global", norms=_L1), trial={"max_iter": 10, "n_samples": 3}),
    "fmn": Entry(
        traits=_minimum(),
        norm="norm",
        l0=True,
        trial={"steps": 20},
        defect=(
            "until it has found something it steps exactly onto the linearised boundary, so where the model is locally "
            "linear a row may stay on the wrong side of it whatever the steps"
        ),
    ),
    "pdgd": Entry(traits=_minimum(norms=_L2), random=("random_init",), trial={"num_steps": 20}),
    "pdpgd": Entry(traits=_minimum(), norm="norm", l0=True, random=("random_init",), trial={"num_steps": 20}),
    "perc_al": Entry(
        traits=_minimum(),
        dimensions=4,
        channels=3,
        trial={"max_iterations": 20},
        defect="it minimises a distance of colours, and rounds its points to 256 levels",
    ),
    "pgd_linf": Entry(
        traits=AttackTraits(batching="full", norms=_LINF, failure="input"),
        epsilon="ε",
        dlr_classes=3,
        subsets=("restarts",),
        trial={"steps": 10},
    ),
    "sdf": Entry(
        traits=_minimum("single", norms=_L2),
        trial={"steps": 5, "df_steps": 10},
        defect="the point of its last step is never tried, so steps=1 always returns the input",
    ),
    "sigma_zero": Entry(traits=_minimum(norms=_L1), trial={"num_steps": 20}),
    "str_attack": Entry(
        traits=_minimum(norms=_L2, batch_dependent=True),
        dimensions=4,
        trial={"binary_search_steps": 2, "max_iterations": 20, "initial_const": 50.0, "retrain": False},
        defect=(
            "where groups overlap (stride below group_size) and fix_y_step is False, its step size depends on the "
            f"number of groups instead of the iteration; {_PATIENT}"
        ),
    ),
    "tr": Entry(
        traits=_minimum("single", norms=_NO_L1, failure="last"),
        norm="p",
        trial={"iter": 50, "eps": 0.01},
        defect="its default eps, the longest step, lets 100 iterations get no farther than about .1 in its norm",
    ),
    "vfga": Entry(traits=_minimum("single", seeds="global", norms=_L1), trial={"max_iter": 10, "n_samples": 3}),
}
