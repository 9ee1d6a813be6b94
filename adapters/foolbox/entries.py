"""Data on each of Foolbox's attack classes.

Batching, ``batch_dependent``, ``leaves_ball`` and ``failure`` were measured with Foolbox 3.3.4, by recording what each
class queries of a model and by attacking samples one by one, together, and next to others. All classes query full
batches in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from robust_ext.adapters.catalogue import make_entry
from robust_ext.registry.base import AttackListing


@dataclass(frozen=True, kw_only=True)
class Entry(AttackListing):
    """The data on a class besides its listing.

    Args:
        unit_space: Whether it takes inputs in [0, 1] for granted; it is then run in that space.
        targeted: Whether it accepts only targets; it is then given the likeliest wrong class of each input.
        refines: Whether it raises as soon as one refined point is adversarial where its start was not, or the reverse.
        flat: Power of the gradient's size that it divides by, in float32; 0 for a class that bears a zero gradient.
        start: Class and settings of the attack it starts with by default; None for a class that needs no start.
        norm_setting: The setting that chooses its norm, which follows the threat model's; empty without one.
    """

    unit_space: bool = False
    targeted: bool = False
    refines: bool = False
    flat: int = 0
    start: tuple[str, Mapping[str, Any]] | None = None
    norm_setting: str = ""


_row = partial(make_entry, Entry)
_NORM_OF = {"Linf": "linf", "LInf": "linf", "Linfinity": "linf", "L2": "l2", "L1": "l1", "L0": "l1"}
_BLENDED = "LinearSearchBlendedUniformNoiseAttack"
_MINIMUM = "full minimum_norm"
_SEARCHED = f"{_MINIMUM} black-box leaves_ball"
_LOST = "it raises for all rows where its start fails for one; such a row is given back as its input"
_UNIT_STEPS = "its steps are made for bounds that lie 1 apart, and are too short for wider ones"
_ZEROS = "it returns an image of zeros where it fails; such a row is given back as its input"
_RESCALED = "it divides the noise by its largest value instead of its largest size, and so queries beyond epsilon"
_ONE_DRAW = "it tries one random point"
_PLAIN = partial(
    _row, trial_norm="l2", misses="it moves each image in one direction, in which the boundary is seldom near"
)


def _families() -> dict[str, Entry]:
    """Return the entries of classes that differ in their norm or in the kind of their noise."""
    entries = {}
    for prefix in ("Linf", "L2", "L1"):
        entries[f"{prefix}FastGradientAttack"] = _row(f"full {_NORM_OF[prefix]}")
        for stem in ("BasicIterativeAttack", "ProjectedGradientDescentAttack"):
            entries[f"{prefix}{stem}"] = entries[f"{prefix}Adam{stem}"] = _row(f"full {_NORM_OF[prefix]}", "steps=20")
        entries[f"{prefix}MomentumIterativeFastGradientMethod"] = entries[f"{prefix}BasicIterativeAttack"]
    for kind in ("Gaussian", "Uniform"):
        for aware in ("", "ClippingAware"):
            repeated = _row("l2 full black-box input", "repeats=100")
            entries[f"L2{aware}Additive{kind}NoiseAttack"] = _row("l2 full black-box", misses=_ONE_DRAW)
            entries[f"L2{aware}RepeatedAdditive{kind}NoiseAttack"] = repeated
    for prefix in ("Linfinity", "L2", "L1", "L0"):
        entries[f"{prefix}BrendelBethgeAttack"] = _row(
            f"{_NORM_OF[prefix]} {_MINIMUM} leaves_ball batch_dependent raises",
            "steps=50",
            packages="numba",
            misses="it changes few values, by as much as the bounds allow" if prefix == "L0" else "",
            defect=_LOST,
            start=(_BLENDED, {}),
        )
    never = "its projection divides norms by themselves and so never projects: results are far too large; "
    for prefix in ("LInf", "L2", "L1", "L0"):
        entries[f"{prefix}FMNAttack"] = _row(
            f"{_NORM_OF[prefix]} {_MINIMUM} leaves_ball input none",
            "steps=10",
            defect=f"{never if prefix == 'L2' else ''}{_UNIT_STEPS}",
        )
    return entries


ENTRIES: Mapping[str, Entry] = _families() | {
    "LinfAdditiveUniformNoiseAttack": _row("linf full black-box", misses=_ONE_DRAW, defect=_RESCALED),
    "LinfRepeatedAdditiveUniformNoiseAttack": _row(
        "linf full black-box leaves_ball input", "repeats=100", defect=_RESCALED
    ),
    "BinarizationRefinementAttack": _row(
        f"{_SEARCHED} starting_points raises refines",
        defect="it raises for all rows where refining loses one; such a row is given back as its input",
        trial_norm="l1",
        norm_setting="distance",
    ),
    "BinarySearchContrastReductionAttack": _PLAIN(
        f"{_SEARCHED} none", "binary_search_steps=20", norm_setting="distance"
    ),
    "BoundaryAttack": _row(
        f"l2 {_SEARCHED} batch_dependent raises", "steps=500", defect=_LOST, start=(_BLENDED, {"steps": 50})
    ),
    "DDNAttack": _row(f"l2 {_MINIMUM} leaves_ball input none", "steps=10", defect=_UNIT_STEPS),
    "EADAttack": _row(
        f"l1 {_MINIMUM} leaves_ball batch_dependent zeros none",
        "binary_search_steps=3, steps=20, initial_const=1.0",
        defect=_ZEROS,
    ),
    "GaussianBlurAttack": _PLAIN(f"{_SEARCHED} input none", "steps=100", norm_setting="distance"),
    "GenAttack": _row(
        "linf full black-box batch_dependent best unit_space targeted",
        "steps=50, population=10",
        defect="it clips to [0, 1] in any bounds, and logits above 88 overflow in its fitness",
    ),
    "HopSkipJumpAttack": _row(
        f"linf l2 {_SEARCHED} batch_dependent raises unit_space",
        "steps=2, initial_gradient_eval_steps=10, max_gradient_eval_steps=20",
        defect=f"it clips to [0, 1] in any bounds; {_LOST}",
        start=(_BLENDED, {"steps": 50}),
        norm_setting="constraint",
    ),
    "InversionAttack": _PLAIN(f"{_SEARCHED} none", norm_setting="distance"),
    "L2CarliniWagnerAttack": _row(
        f"l2 {_MINIMUM} leaves_ball batch_dependent zeros none",
        "binary_search_steps=3, steps=20, initial_const=1.0",
        defect=_ZEROS,
    ),
    "L2ContrastReductionAttack": _PLAIN("l2 full black-box none"),
    "L2DeepFoolAttack": _row(f"l2 {_MINIMUM} none", "steps=10"),
    _BLENDED: _PLAIN(_SEARCHED, "directions=100, steps=100", norm_setting="distance"),
    "LinearSearchContrastReductionAttack": _PLAIN(f"{_SEARCHED} none", "steps=100", norm_setting="distance"),
    "LinfDeepFoolAttack": _row(f"linf {_MINIMUM} none", "steps=10"),
    "NewtonFoolAttack": _row(
        f"l2 {_MINIMUM} none",
        "steps=100",
        misses="it descends a probability, which is flat where logits lie far apart",
        defect="it returns NaN for a row whose gradient vanishes; such a row now stays where it is",
        flat=4,
    ),
    "PointwiseAttack": _row(
        f"{_SEARCHED} batch_dependent raises",
        defect=f"it raises AttributeError for any numeric epsilon, and is given none; {_LOST}",
        trial_norm="l1",
        start=("SaltAndPepperNoiseAttack", {}),
        norm_setting="distance",
    ),
    "SaltAndPepperNoiseAttack": _row(f"l2 {_SEARCHED} input", "steps=200"),
    "SparseL1DescentAttack": _row(
        "l1 full batch_dependent leaves_ball none",
        "steps=20",
        defect="as soon as one row leaves the ball all are projected, which moves those inside it too",
    ),
    "SpatialAttack": _row(
        f"{_SEARCHED} input normless",
        "num_translations=2, num_rotations=3",
        defect="it fills borders with 0 in any bounds",
    ),
    "VirtualAdversarialAttack": _row(
        "l2 full",
        "steps=1, xi=0.01",
        defect="its default xi of 1e-6 is lost in float32 rounding, set 0.01; it returns NaN for a row whose "
        "gradient vanishes, and such a row now goes in a set direction",
        flat=2,
    ),
}

UNUSABLE: Mapping[str, str] = {
    "Attack": "it is the base class; name an attack",
    "DatasetAttack": "it replaces a sample by other samples that it was fed, instead of perturbing it; use "
    "LinearSearchBlendedUniformNoiseAttack",
}

UNTARGETED = frozenset(
    (
        *(f"{prefix}FastGradientAttack" for prefix in ("Linf", "L2", "L1")),
        "L2DeepFoolAttack",
        "LinfDeepFoolAttack",
        "NewtonFoolAttack",
        "VirtualAdversarialAttack",
    )
)
"""Classes that refuse targets, or go to the nearest class for any target."""
