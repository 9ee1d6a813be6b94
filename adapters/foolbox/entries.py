"""Data on each of Foolbox's attack classes.

Batching, ``batch_dependent``, ``leaves_ball`` and ``failure`` were measured with Foolbox 3.3.4, by recording what each
class queries of a model and by attacking samples one by one, together, and next to others. All classes query full
batches in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from robust_ext.adapters.catalogue import AttackEntry
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.threat import NORMS


@dataclass(frozen=True, kw_only=True)
class Entry(AttackEntry):
    """The data on a class besides :class:`robust_ext.adapters.catalogue.AttackEntry`.

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


def _fixed(norm: str, **traits: Any) -> AttackTraits:
    return AttackTraits(batching="full", norms=(norm,), **traits)


def _minimum(*norms: str, **traits: Any) -> AttackTraits:
    return AttackTraits(batching="full", norms=norms, minimum_norm=True, **traits)


_NORM_OF = {"Linf": "linf", "LInf": "linf", "Linfinity": "linf", "L2": "l2", "L1": "l1", "L0": "l1"}
_BLENDED = "LinearSearchBlendedUniformNoiseAttack"
_STEPS = {"steps": 20}
_ONE_DRAW = "it tries one random point"
_UNIT_STEPS = "its steps are made for bounds that lie 1 apart, and are too short for wider ones"


def _descent() -> dict[str, Entry]:
    """Return the entries of attacks by gradient descent, from one step to momentum and Adam."""
    entries = {}
    for prefix in ("Linf", "L2", "L1"):
        norm = _NORM_OF[prefix]
        iterated = Entry(traits=_fixed(norm), trial=_STEPS)
        entries[f"{prefix}FastGradientAttack"] = Entry(traits=_fixed(norm))
        entries[f"{prefix}BasicIterativeAttack"] = iterated
        entries[f"{prefix}AdamBasicIterativeAttack"] = iterated
        entries[f"{prefix}MomentumIterativeFastGradientMethod"] = iterated
        entries[f"{prefix}ProjectedGradientDescentAttack"] = iterated
        entries[f"{prefix}AdamProjectedGradientDescentAttack"] = iterated
    return entries


def _noise() -> dict[str, Entry]:
    l2, linf = _fixed("l2", gradients=False), _fixed("linf", gradients=False)
    rescaled = "it divides the noise by its largest value instead of its largest size, and so queries beyond epsilon"
    entries = {}
    for aware in ("", "ClippingAware"):
        for kind in ("Gaussian", "Uniform"):
            entries[f"L2{aware}Additive{kind}NoiseAttack"] = Entry(traits=l2, misses=_ONE_DRAW)
            repeated = _fixed("l2", gradients=False, failure="input")
            entries[f"L2{aware}RepeatedAdditive{kind}NoiseAttack"] = Entry(traits=repeated, trial={"repeats": 100})
    entries["LinfAdditiveUniformNoiseAttack"] = Entry(traits=linf, misses=_ONE_DRAW, defect=rescaled)
    entries["LinfRepeatedAdditiveUniformNoiseAttack"] = Entry(
        traits=_fixed("linf", gradients=False, leaves_ball=True, failure="input"),
        trial={"repeats": 100},
        defect=rescaled,
    )
    return entries


def _brendel_bethge() -> dict[str, Entry]:
    entries = {}
    for prefix in ("Linfinity", "L2", "L1", "L0"):
        traits = _minimum(
            _NORM_OF[prefix], leaves_ball=True, batch_dependent=True, failure="raises", packages=("numba",)
        )
        entries[f"{prefix}BrendelBethgeAttack"] = Entry(
            traits=traits,
            trial={"steps": 50},
            misses="it changes few values, by as much as the bounds allow" if prefix == "L0" else "",
            defect="it raises for all rows where its start fails for one; such a row is given back as its input",
            start=(_BLENDED, {}),
        )
    return entries


def _fast_minimum_norm() -> dict[str, Entry]:
    never = "its projection divides norms by themselves and so never projects: results are far too large; "
    return {
        f"{prefix}FMNAttack": Entry(
            traits=_minimum(_NORM_OF[prefix], leaves_ball=True, failure="input", seeds="none"),
            trial={"steps": 10},
            defect=f"{never if prefix == 'L2' else ''}{_UNIT_STEPS}",
        )
        for prefix in ("LInf", "L2", "L1", "L0")
    }


_PLAIN: Mapping[str, Any] = {
    "trial_norm": "l2",
    "misses": "it goes one way for each image, which the boundary is seldom near to",
}
_SEARCHED: Mapping[str, Any] = {"gradients": False, "leaves_ball": True}
_LOST = "it raises for all rows where its start fails for one; such a row is given back as its input"
_OTHERS: Mapping[str, Entry] = {
    "BinarizationRefinementAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED, starting_points=True, failure="raises"),
        defect="it raises for all rows where refining loses one; such a row is given back as its input",
        trial_norm="l1",
        refines=True,
        norm_setting="distance",
    ),
    "BinarySearchContrastReductionAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED, seeds="none"),
        trial={"binary_search_steps": 20},
        **_PLAIN,
        norm_setting="distance",
    ),
    "BoundaryAttack": Entry(
        traits=_minimum("l2", **_SEARCHED, batch_dependent=True, failure="raises"),
        trial={"steps": 500},
        defect=_LOST,
        start=(_BLENDED, {"steps": 50}),
    ),
    "DDNAttack": Entry(
        traits=_minimum("l2", leaves_ball=True, failure="input", seeds="none"), trial={"steps": 10}, defect=_UNIT_STEPS
    ),
    "EADAttack": Entry(
        traits=_minimum("l1", leaves_ball=True, batch_dependent=True, failure="zeros", seeds="none"),
        trial={"binary_search_steps": 3, "steps": 20, "initial_const": 1.0},
        defect="it returns an image of zeros where it fails; such a row is given back as its input",
    ),
    "GaussianBlurAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED, failure="input", seeds="none"),
        trial={"steps": 100},
        **_PLAIN,
        norm_setting="distance",
    ),
    "GenAttack": Entry(
        traits=_fixed("linf", gradients=False, batch_dependent=True, failure="best"),
        trial={"steps": 50, "population": 10},
        defect="it clips to [0, 1] whatever the bounds, and logits above 88 overflow in its fitness",
        unit_space=True,
        targeted=True,
    ),
    "HopSkipJumpAttack": Entry(
        traits=_minimum("linf", "l2", **_SEARCHED, batch_dependent=True, failure="raises"),
        trial={"steps": 2, "initial_gradient_eval_steps": 10, "max_gradient_eval_steps": 20},
        defect=f"it clips to [0, 1] whatever the bounds; {_LOST}",
        unit_space=True,
        start=(_BLENDED, {"steps": 50}),
        norm_setting="constraint",
    ),
    "InversionAttack": Entry(traits=_minimum(*NORMS, **_SEARCHED, seeds="none"), **_PLAIN, norm_setting="distance"),
    "L2CarliniWagnerAttack": Entry(
        traits=_minimum("l2", leaves_ball=True, batch_dependent=True, failure="zeros", seeds="none"),
        trial={"binary_search_steps": 3, "steps": 20, "initial_const": 1.0},
        defect="it returns an image of zeros where it fails; such a row is given back as its input",
    ),
    "L2ContrastReductionAttack": Entry(traits=_fixed("l2", gradients=False, seeds="none"), **_PLAIN),
    "L2DeepFoolAttack": Entry(traits=_minimum("l2", seeds="none"), trial={"steps": 10}),
    "LinearSearchBlendedUniformNoiseAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED), trial={"directions": 100, "steps": 100}, **_PLAIN, norm_setting="distance"
    ),
    "LinearSearchContrastReductionAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED, seeds="none"), trial={"steps": 100}, **_PLAIN, norm_setting="distance"
    ),
    "LinfDeepFoolAttack": Entry(traits=_minimum("linf", seeds="none"), trial={"steps": 10}),
    "NewtonFoolAttack": Entry(
        traits=_minimum("l2", seeds="none"),
        trial={"steps": 100},
        misses="it descends a probability, which is flat where logits lie far apart",
        defect="it returns NaN for a row whose gradient vanishes; such a row now stays where it is",
        flat=4,
    ),
    "PointwiseAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED, batch_dependent=True, failure="raises"),
        defect=f"it raises AttributeError for any numeric epsilon, and is given none; {_LOST}",
        trial_norm="l1",
        start=("SaltAndPepperNoiseAttack", {}),
        norm_setting="distance",
    ),
    "SaltAndPepperNoiseAttack": Entry(traits=_minimum("l2", **_SEARCHED, failure="input"), trial={"steps": 200}),
    "SparseL1DescentAttack": Entry(
        traits=_fixed("l1", batch_dependent=True, leaves_ball=True, seeds="none"),
        trial=_STEPS,
        defect="as soon as one row leaves the ball all are projected, which moves those inside it too",
    ),
    "SpatialAttack": Entry(
        traits=_minimum(*NORMS, **_SEARCHED, failure="input", normless=True),
        trial={"num_translations": 2, "num_rotations": 3},
        defect="it fills borders with 0 whatever the bounds",
    ),
    "VirtualAdversarialAttack": Entry(
        traits=_fixed("l2"),
        trial={"steps": 1, "xi": 0.01},
        defect="its default xi of 1e-6 is lost in float32 rounding, set 0.01; it returns NaN for a row whose "
        "gradient vanishes, and such a row now goes in a set direction",
        flat=2,
    ),
}

ENTRIES: Mapping[str, Entry] = {**_descent(), **_noise(), **_brendel_bethge(), **_fast_minimum_norm(), **_OTHERS}
