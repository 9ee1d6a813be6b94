"""Data on torchattacks' classes.

Batching, ``batch_dependent`` and ``leaves_ball`` were measured by a module that records its queries, as the tests do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from robust_ext.adapters.catalogue import make_entry
from robust_ext.registry.base import AttackListing


@dataclass(frozen=True, kw_only=True)
class Entry(AttackListing):
    """The data on a class besides its listing.

    Args:
        first_step: Default of ``alpha`` as a part of epsilon; None where it follows from the steps.
        three_channels: Whether it accepts images of three channels only; fewer are filled up with channels that the
            target does not see.
        square: By norm, the smallest side of an image where it accepts square images only.
        positive_for: Value of its setting ``loss`` (empty: it has none) with which its margin masks logits by zeros, so
            that it is right for logits of at least 0 only; the adapter shifts them there. None: with no value.
        next_class: Whether it aims at the next class, which torchattacks counts modulo 10 and the adapter modulo the
            target's classes.
        least: Smallest values of settings with which it runs.
    """

    first_step: float | None = None
    three_channels: bool = False
    square: Mapping[str, int] = field(default_factory=dict)
    positive_for: str | None = None
    next_class: bool = False
    least: Mapping[str, int] = field(default_factory=dict)


_row = partial(make_entry, Entry)
_STEPS = "steps=10"
# Its first l2 point is made of tiles of a fifth of the side.
_SQUARE_L2 = {"l2": 5}
_ZERO_GRADIENT = "a row whose gradient is zero at one step does not move any more"
_ZERO_DIVISION = "a row whose gradient is zero becomes NaN"
_SIGN_OF_LOGITS = "its margin is wrong where the label's logit or all others are negative; the adapter fixes that"
_FEW_STEPS = "its default is 10 steps, where the paper has 100"
_MINIMUM = "minimum_norm single"
_FULL_MINIMUM = "minimum_norm full batch_dependent leaves_ball input none"
_RANDOM_MINIMUM = "l1 minimum_norm single black-box leaves_ball best global"
_AHEAD = _row("linf full none leaves_ball", _STEPS, defect=_ZERO_GRADIENT)
_NEIGHBOURS = _row("linf full leaves_ball", "steps=10, N=2", defect=_ZERO_GRADIENT)
_PATCHWISE = _row(
    "linf full none three_channels", "num_iter_set=3", defect="momentum and prob are accepted and not used"
)
_DIVERSE = partial(_row, trial=_STEPS, defect=_ZERO_GRADIENT, square={"linf": 2})


def _ead(norms: str) -> Entry:
    return _row(
        f"{norms} {_FULL_MINIMUM}",
        "binary_search_steps=4, max_iterations=50, lr=0.02, initial_const=0.01",
        defect="its first step moves the image it starts from too, which can leave the bounds (the adapter clamps "
        f"what it returns); {_SIGN_OF_LOGITS}; kappa is added to the labels of all rows",
        positive_for="",
        least={"max_iterations": 10},
    )


ENTRIES: Mapping[str, Entry] = {
    "APGD": _row("linf l2 any input setting", _STEPS, defect=_FEW_STEPS),
    # Its loss reads the fourth largest logit.
    "APGDT": _row(
        "linf l2 any input setting batch_dependent",
        _STEPS,
        classes=4,
        defect=f"{_FEW_STEPS}; in l2 all rows take the first row's step size",
    ),
    # Its FAB goes outside the ball, which decides for single samples.
    "AutoAttack": _row(
        "linf l2 single input setting batch_dependent leaves_ball",
        "version='rand'",
        classes=4,
        defect="its APGD and FAB make 10 steps, where the paper has 100, and no setting changes that",
        square=_SQUARE_L2,
    ),
    "BIM": _row("linf full none", _STEPS),
    "CW": _row(
        f"l2 {_FULL_MINIMUM}",
        "steps=20, c=10, lr=0.05",
        defect=f"values that are exactly 0 or 1 never move; {_SIGN_OF_LOGITS}; one c for all, without a search",
        positive_for="",
    ),
    "DIFGSM": _DIVERSE("linf full batch_dependent leaves_ball"),
    "DeepFool": _row(f"l2 {_MINIMUM} none", _STEPS, defect=_ZERO_DIVISION),
    "EADEN": _ead("l1 l2"),
    "EADL1": _ead("l1"),
    "EOTPGD": _row("linf full", _STEPS),
    "FAB": _row(
        "linf l2 single leaves_ball input setting",
        _STEPS,
        defect=f"{_FEW_STEPS}; its l1 form raises; it returns only what lies within epsilon",
    ),
    "FFGSM": _row("linf full", first_step=1.25),
    "FGSM": _row("linf full none"),
    "GN": _row(
        "full black-box",
        trial_norm="l2",
        misses="it tries one random point",
        defect="its noise has one standard deviation, 0.1, for any epsilon",
    ),
    "JSMA": _row(
        f"l1 {_MINIMUM} none next_class",
        "gamma=0.1",
        defect="the class it aims at is counted modulo 10, which raises where there are fewer; the adapter fixes that",
    ),
    "Jitter": _row("linf full", _STEPS),
    "MIFGSM": _row("linf full none", _STEPS, defect=_ZERO_GRADIENT),
    "MultiAttack": _row("input", "attacks=['PGD(steps=3)', 'FGSM']"),
    "NIFGSM": _AHEAD,
    "OnePixel": _row(_RANDOM_MINIMUM, _STEPS),
    "PGD": _row("linf full", _STEPS),
    "PGDL2": _row("l2 full", _STEPS),
    "PGDRS": _row("linf single leaves_ball", _STEPS),
    "PGDRSL2": _row("l2 single leaves_ball", _STEPS),
    "PIFGSM": _PATCHWISE,
    "PIFGSMPP": _PATCHWISE,
    "Pixle": _row(
        _RANDOM_MINIMUM,
        "restarts=20, max_iterations=20",
        misses="it puts pixels elsewhere, by a change of any size",
        defect="rows and columns of the pixels it writes are exchanged, and the last of each is never written",
        square={"l1": 2},
    ),
    "RFGSM": _row("linf full", _STEPS),
    "SINIFGSM": _AHEAD,
    "SPSA": _row(
        "linf single black-box batch_dependent leaves_ball",
        "nb_sample=16, nb_iter=10",
        defect="its default is one step of 0.01, however large epsilon is",
    ),
    "SparseFool": _row(f"l1 {_MINIMUM} none leaves_ball", "steps=5", defect=_ZERO_DIVISION),
    "Square": _row("linf l2 any input setting batch_dependent black-box", "n_queries=100", square=_SQUARE_L2),
    "TIFGSM": _DIVERSE("linf full batch_dependent leaves_ball three_channels"),
    "TPGD": _row("linf full", _STEPS),
    "UPGD": _row(
        "linf full none",
        _STEPS,
        defect=f"{_ZERO_GRADIENT}; with loss='margin' {_SIGN_OF_LOGITS}",
        positive_for="margin",
    ),
    "VANILA": _row("full black-box input none", misses="it returns the inputs"),
    "VMIFGSM": _NEIGHBOURS,
    "VNIFGSM": _NEIGHBOURS,
}

UNUSABLE: Mapping[str, str] = {
    "LGV": "it trains copies of the network on training data, which a target does not have; use BIM, which it runs "
    "inside, on the target itself"
}

UNTARGETED = frozenset(
    ("APGD", "APGDT", "AutoAttack", "DeepFool", "GN", "MultiAttack", "PIFGSM", "SparseFool", "TPGD", "VANILA")
)
"""Classes without a targeted mode."""
