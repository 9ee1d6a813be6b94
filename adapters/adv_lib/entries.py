"""Data on adv-lib's attacks, measured on version 0.2.8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from robust_ext.adapters.catalogue import make_entry
from robust_ext.registry.base import AttackListing


@dataclass(frozen=True, kw_only=True)
class Entry(AttackListing):
    """The data on a function besides its listing.

    The norms of its traits are those it can be set to minimise; l1 for attacks that minimise l0, as a change of k
    values within the bounds is at most k widths in l1.

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


_row = partial(make_entry, Entry)
_MINIMUM = "minimum_norm input leaves_ball"
_FULL, _SINGLE = f"full {_MINIMUM}", f"single {_MINIMUM}"
_PATIENT = "its default settings take many thousands of passes"

ENTRIES: Mapping[str, Entry] = {
    "alma": _row(f"l2 l1 {_FULL} none", "num_steps=20", classes=3, norm="distance", random=("init_lr_distance",)),
    "apgd": _row(
        "full input",
        "n_iter=10",
        classes=3,
        norm="norm",
        epsilon="eps",
        dlr_classes=3,
        subsets=("n_restarts",),
        defect="with best_loss=True it ignores n_iter and makes 100 iterations",
    ),
    "apgd_targeted": _row(
        "any input restore",
        "n_iter=5",
        classes=4,
        norm="norm",
        epsilon="eps",
        dlr_classes=4,
        defect="a row that is misclassified already is attacked towards its own label too; such rows keep their input",
    ),
    "minimal_apgd": _row(
        f"{_FULL} global",
        "n_iter=5, binary_search_steps=4",
        classes=3,
        norm="norm",
        epsilon="max_eps",
        dlr_classes=3,
        subsets=("n_restarts", "targeted_version"),
    ),
    "carlini_wagner_l2": _row(
        f"l2 {_FULL} none batch_dependent",
        "binary_search_steps=3, max_iterations=20, initial_const=1.0",
        defect=f"fewer than ten max_iterations divide by zero unless abort_early=False; {_PATIENT}",
    ),
    "carlini_wagner_linf": _row(
        f"linf {_SINGLE} none batch_dependent", "max_iterations=5, initial_const=0.5", defect=_PATIENT
    ),
    "ddn": _row(
        f"l2 {_FULL} global",
        "steps=20",
        defect="it rounds its points to 256 grey levels by default, which may miss thin regions; levels=None does not",
    ),
    "df": _row(f"linf l2 {_SINGLE} none", "steps=20", norm="norm"),
    "fab": _row(f"{_FULL} none", "n_iter=10", norm="norm", random=("restarts",)),
    "fga": _row(f"l1 {_SINGLE} global", "max_iter=10, n_samples=3"),
    "fmn": _row(
        f"{_FULL} none l0",
        "steps=20",
        norm="norm",
        defect="until it has found something it steps exactly onto the linearised boundary, so where the model is "
        "locally linear a row may stay on the wrong side of it for any number of steps",
    ),
    "pdgd": _row(f"l2 {_FULL} none", "num_steps=20", random=("random_init",)),
    "pdpgd": _row(f"{_FULL} none l0", "num_steps=20", norm="norm", random=("random_init",)),
    "perc_al": _row(
        f"{_FULL} none",
        "max_iterations=20",
        dimensions=4,
        channels=3,
        defect="it minimises a distance of colours, and rounds its points to 256 levels",
    ),
    "pgd_linf": _row("linf full input", "steps=10", epsilon="ε", dlr_classes=3, subsets=("restarts",)),
    "sdf": _row(
        f"l2 {_SINGLE} none",
        "steps=5, df_steps=10",
        defect="the point of its last step is never tried, so steps=1 always returns the input",
    ),
    "sigma_zero": _row(f"l1 {_FULL} none", "num_steps=20"),
    "str_attack": _row(
        f"l2 {_FULL} none batch_dependent",
        "binary_search_steps=2, max_iterations=20, initial_const=50.0, retrain=False",
        dimensions=4,
        defect="where groups overlap (stride below group_size) and fix_y_step is False, its step size depends on the "
        f"number of groups instead of the iteration; {_PATIENT}",
    ),
    "tr": _row(
        "linf l2 single minimum_norm leaves_ball last none",
        "iter=50, eps=0.01",
        norm="p",
        defect="its default eps, the longest step, lets 100 iterations get no farther than about .1 in its norm",
    ),
    "vfga": _row(f"l1 {_SINGLE} global", "max_iter=10, n_samples=3"),
}

_DENSE = "it attacks segmentation, where every pixel has a label; use"
UNUSABLE: Mapping[str, str] = {
    "segmentation.alma_prox": f"{_DENSE} alma",
    "segmentation.asma": f"{_DENSE} pgd_linf",
    "segmentation.dag": f"{_DENSE} df",
    "segmentation.pdgd": f"{_DENSE} pdgd",
    "segmentation.pdpgd": f"{_DENSE} pdpgd",
}
