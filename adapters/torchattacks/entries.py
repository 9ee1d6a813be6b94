"""Data on torchattacks' classes.

Batching, ``batch_dependent`` and ``leaves_ball`` were measured by a module that records its queries, as the tests do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from robust_ext.adapters.catalogue import AttackEntry
from robust_ext.attacks.base import AttackTraits


@dataclass(frozen=True, kw_only=True)
class Entry(AttackEntry):
    """The data on a class besides :class:`robust_ext.adapters.catalogue.AttackEntry`.

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


_LINF, _L2, _L1 = ("linf",), ("l2",), ("l1",)
_BOTH = ("linf", "l2")
# Its first l2 point is made of tiles of a fifth of the side.
_SQUARE_L2 = {"l2": 5}
_STEPS = {"steps": 10}
_ZERO_GRADIENT = "a row whose gradient is zero at one step does not move any more"
_ZERO_DIVISION = "a row whose gradient is zero becomes NaN"
_SIGN_OF_LOGITS = "its margin is wrong where the label's logit or all others are negative; the adapter fixes that"
_FEW_STEPS = "its default is 10 steps, where the paper has 100"


_AUTO = AttackTraits(batching="any", norms=_BOTH, failure="input", seeds="setting")


def _descent(**changes: Any) -> AttackTraits:
    return replace(AttackTraits(batching="full", norms=_LINF), **changes)


def _minimum(norms: tuple[str, ...], **changes: Any) -> AttackTraits:
    return replace(AttackTraits(batching="single", minimum_norm=True, norms=norms, seeds="none"), **changes)


_MOMENTUM = Entry(traits=_descent(seeds="none"), trial=_STEPS, defect=_ZERO_GRADIENT)
_AHEAD = Entry(traits=_descent(seeds="none", leaves_ball=True), trial=_STEPS, defect=_ZERO_GRADIENT)
_NEIGHBOURS = Entry(traits=_descent(leaves_ball=True), trial={"steps": 10, "N": 2}, defect=_ZERO_GRADIENT)
_DIVERSE = _descent(batch_dependent=True, leaves_ball=True)
_SMOOTHED = _descent(batching="single", leaves_ball=True)


def _ead(norms: tuple[str, ...]) -> Entry:
    return Entry(
        traits=_minimum(norms, batching="full", batch_dependent=True, leaves_ball=True, failure="input"),
        trial={"binary_search_steps": 4, "max_iterations": 50, "lr": 0.02, "initial_const": 0.01},
        defect="its first step moves the image it starts from too, which can leave the bounds (the adapter clamps "
        f"what it returns); {_SIGN_OF_LOGITS}; kappa is added to the labels of all rows",
        positive_for="",
        least={"max_iterations": 10},
    )


_PATCHWISE = Entry(
    traits=_descent(seeds="none"),
    trial={"num_iter_set": 3},
    defect="momentum and prob are accepted and not used",
    three_channels=True,
)

ENTRIES: Mapping[str, Entry] = {
    "APGD": Entry(traits=_AUTO, trial=_STEPS, defect=_FEW_STEPS),
    "APGDT": Entry(
        # Its loss reads the fourth largest logit.
        traits=replace(_AUTO, batch_dependent=True, minimum_classes=4),
        trial=_STEPS,
        defect=f"{_FEW_STEPS}; in l2 all rows take the first row's step size",
    ),
    # Its FAB goes outside the ball, which decides for single samples.
    "AutoAttack": Entry(
        traits=replace(_AUTO, batching="single", batch_dependent=True, leaves_ball=True, minimum_classes=4),
        trial={"version": "rand"},
        defect="its APGD and FAB make 10 steps, where the paper has 100, and no setting changes that",
        square=_SQUARE_L2,
    ),
    "BIM": Entry(traits=_descent(seeds="none"), trial=_STEPS),
    "CW": Entry(
        traits=_minimum(_L2, batching="full", batch_dependent=True, leaves_ball=True, failure="input"),
        trial={"steps": 20, "c": 10, "lr": 0.05},
        defect=f"values that are exactly 0 or 1 never move; {_SIGN_OF_LOGITS}; one c for all, without a search",
        positive_for="",
    ),
    "DIFGSM": Entry(traits=_DIVERSE, trial=_STEPS, defect=_ZERO_GRADIENT, square={"linf": 2}),
    "DeepFool": Entry(traits=_minimum(_L2), trial={"steps": 10}, defect=_ZERO_DIVISION),
    "EADEN": _ead(("l1", "l2")),
    "EADL1": _ead(_L1),
    "EOTPGD": Entry(traits=_descent(), trial=_STEPS),
    "FAB": Entry(
        traits=AttackTraits(batching="single", leaves_ball=True, norms=_BOTH, failure="input", seeds="setting"),
        trial=_STEPS,
        defect=f"{_FEW_STEPS}; its l1 form raises; it returns only what lies within epsilon",
    ),
    "FFGSM": Entry(traits=_descent(), first_step=1.25),
    "FGSM": Entry(traits=_descent(seeds="none")),
    "GN": Entry(
        traits=AttackTraits(batching="full", gradients=False),
        trial_norm="l2",
        misses="it tries one random point",
        defect="its noise has one standard deviation, 0.1, whatever epsilon is",
    ),
    "JSMA": Entry(
        traits=_minimum(_L1),
        trial={"gamma": 0.1},
        defect="the class it aims at is counted modulo 10, which raises where there are fewer; the adapter fixes that",
        next_class=True,
    ),
    "Jitter": Entry(traits=_descent(), trial=_STEPS),
    "MIFGSM": _MOMENTUM,
    "MultiAttack": Entry(traits=AttackTraits(failure="input"), trial={"attacks": ["PGD(steps=3)", "FGSM"]}),
    "NIFGSM": _AHEAD,
    "OnePixel": Entry(
        traits=_minimum(_L1, gradients=False, leaves_ball=True, failure="best", seeds="global"), trial=_STEPS
    ),
    "PGD": Entry(traits=_descent(), trial=_STEPS),
    "PGDL2": Entry(traits=_descent(norms=_L2), trial=_STEPS),
    "PGDRS": Entry(traits=_SMOOTHED, trial=_STEPS),
    "PGDRSL2": Entry(traits=replace(_SMOOTHED, norms=_L2), trial=_STEPS),
    "PIFGSM": _PATCHWISE,
    "PIFGSMPP": _PATCHWISE,
    "Pixle": Entry(
        traits=_minimum(_L1, gradients=False, leaves_ball=True, failure="best", seeds="global"),
        trial={"restarts": 20, "max_iterations": 20},
        misses="it puts pixels elsewhere, whatever the size of the change",
        defect="rows and columns of the pixels it writes are exchanged, and the last of each is never written",
        square={"l1": 2},
    ),
    "RFGSM": Entry(traits=_descent(), trial=_STEPS),
    "SINIFGSM": _AHEAD,
    "SPSA": Entry(
        traits=_descent(batching="single", gradients=False, batch_dependent=True, leaves_ball=True),
        trial={"nb_sample": 16, "nb_iter": 10},
        defect="its default is one step of 0.01, however large epsilon is",
    ),
    "SparseFool": Entry(traits=_minimum(_L1, leaves_ball=True), trial={"steps": 5}, defect=_ZERO_DIVISION),
    "Square": Entry(
        traits=replace(_AUTO, batch_dependent=True, gradients=False), trial={"n_queries": 100}, square=_SQUARE_L2
    ),
    "TIFGSM": Entry(traits=_DIVERSE, trial=_STEPS, defect=_ZERO_GRADIENT, three_channels=True, square={"linf": 2}),
    "TPGD": Entry(traits=_descent(), trial=_STEPS),
    "UPGD": Entry(
        traits=_descent(seeds="none"),
        trial=_STEPS,
        defect=f"{_ZERO_GRADIENT}; with loss='margin' {_SIGN_OF_LOGITS}",
        positive_for="margin",
    ),
    "VANILA": Entry(
        traits=AttackTraits(batching="full", gradients=False, failure="input", seeds="none"),
        misses="it returns the inputs",
    ),
    "VMIFGSM": _NEIGHBOURS,
    "VNIFGSM": _NEIGHBOURS,
}
