"""Data on ART's evasion attacks: one entry for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from robust_ext.adapters.art import settings
from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.settings import AttackContext
from robust_ext.adapters.catalogue import AttackEntry
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.threat import NORMS

_EVASION = art.attacks.evasion

_L1 = ("l1",)
_L2 = ("l2",)
_LINF = ("linf",)


@dataclass(frozen=True, kw_only=True)
class Entry(AttackEntry):
    """The data on a class besides :class:`robust_ext.adapters.catalogue.AttackEntry`.

    Args:
        probabilities: Whether it needs a model of probabilities; it is then given the softmax of the logits.
        first_step: Default of ``eps_step`` as a part of epsilon; None where it follows from the iterations.
        unit_space: Whether it takes inputs in [0, 1], or steps that suit them, for granted; it is then run in
            :class:`robust_ext.attacks.running.UnitSpace`, and its settings are those of inputs in [0, 1].
        distances: Settings that are distances between inputs, and stay in the units of the bounds all the same.
        aims: Whether it takes labels as targets; it is then given the class that comes second at the input, or that
            of the guide where there are guides.
        guides: Argument of ``generate`` for points of other classes, which are searched for it; empty where none.
        starts: Whether it begins at a point of another class and never ends, or raises, where it finds none; it is
            then given one, and a sample for which none is found is not attacked.
        patch: Whether it returns a patch, which is then applied to the inputs.
        indices: Whether it takes labels as numbers instead of one-hot vectors.
        channels_last: Whether it takes images of shape (height, width, channels) only.
        fill: Settings that are left out, for the target and the threat model at hand, instead of ART's defaults.
    """

    probabilities: bool = False
    first_step: float | None = None
    unit_space: bool = False
    distances: tuple[str, ...] = ("eps", "eps_step")
    aims: bool = False
    guides: str = ""
    starts: bool = False
    patch: bool = False
    indices: bool = False
    channels_last: bool = False
    fill: Callable[[AttackContext], Mapping[str, Any]] = settings.nothing


_FEW = {"max_iter": 10}
_DESCENT = Entry(traits=AttackTraits(batching="full"), trial=_FEW)
_DEEPFOOL = Entry(
    traits=AttackTraits(batching="full", minimum_norm=True, norms=_L2, leaves_ball=True),
    unit_space=True,
    trial={"max_iter": 10},
)
# These start with steps of twice eps_step and only shorten them; the papers start with twice epsilon.
_AUTO = Entry(
    traits=AttackTraits(batching="any", batch_dependent=True, failure="start"),
    first_step=1.0,
    trial={"max_iter": 20, "nb_random_init": 1},
)
_CONJUGATE = replace(
    _AUTO,
    trial_norm="l2",
    defect="In linf it never takes the sign of its direction, and finds little (.05 where APGD found .88); use "
    "AutoProjectedGradientDescent.",
)
_SINGLE_L2 = AttackTraits(batching="single", gradients=False, minimum_norm=True, norms=_L2, leaves_ball=True)
_TRANSFORMED = AttackTraits(batching="single", leaves_ball=True, normless=True)
_PATCH = Entry(
    traits=replace(_TRANSFORMED, packages=("torchvision",)),
    unit_space=True,
    aims=True,
    patch=True,
    fill=settings.patch,
    trial=_FEW,
)
_STICKER = Entry(
    trial_norm="l1",
    traits=replace(_TRANSFORMED, packages=("cv2",), failure="input"),
    unit_space=True,
    aims=True,
    fill=settings.image_size,
)
_PIXELS = AttackTraits(batching="single", gradients=False, minimum_classes=3, failure="input")
_FEATURES = Entry(
    traits=AttackTraits(batching="full", references=True, norms=_LINF, leaves_ball=True),
    unit_space=True,
    distances=("delta", "step_size"),
    guides="y",
    fill=settings.features,
)
_SINKHORN = dict.fromkeys(("conjugate_sinkhorn_max_iter", "projected_sinkhorn_max_iter"), 30)
_WHOLE = {"use_resize": False, "use_importance": False}
_UNIVERSAL = AttackTraits(batching="single", norms=NORMS, leaves_ball=True)

ENTRIES: Mapping[str, Entry] = {
    "AdversarialPatch": _PATCH,
    "AdversarialPatchNumpy": replace(_PATCH, traits=_TRANSFORMED, trial={"max_iter": 20}, trial_norm="l1"),
    "AdversarialPatchPyTorch": _PATCH,
    "AutoAttack": Entry(
        traits=AttackTraits(
            batching="any",
            batch_dependent=True,
            minimum_classes=3,
            failure="input",
            leaves_ball=True,
            packages=("multiprocess",),
        ),
        first_step=1.0,
        unit_space=True,
        trial={
            "attacks": [
                (_EVASION.AutoProjectedGradientDescent, {"max_iter": 5, "nb_random_init": 1}),
                (_EVASION.SquareAttack, {"max_iter": 10}),
            ]
        },
        defect="It runs DeepFool where the published AutoAttack runs FAB.",
    ),
    "AutoConjugateGradient": _CONJUGATE,
    "AutoProjectedGradientDescent": _AUTO,
    "BasicIterativeMethod": replace(_DESCENT, traits=AttackTraits(batching="full", norms=_LINF)),
    "BoundaryAttack": Entry(
        traits=replace(_SINGLE_L2, failure="input", seeds="own"),
        trial={"max_iter": 100},
        defect="It attacks what the model predicts, not the label.",
    ),
    "BrendelBethgeAttack": Entry(
        traits=AttackTraits(
            batching="single",
            minimum_norm=True,
            leaves_ball=True,
            failure="input",
            starting_points=True,
            packages=("numba",),
        ),
        guides="starting_points",
        starts=True,
        trial={"steps": 10},
    ),
    "CarliniL0Method": Entry(
        traits=AttackTraits(batching="any", minimum_norm=True, norms=_L1, leaves_ball=True, failure="input"),
        unit_space=True,
        trial={"max_iter": 20, "binary_search_steps": 3, "learning_rate": 0.1, "initial_const": 1.0},
        misses="it changes few values, by as much as the bounds allow",
    ),
    "CarliniL2Method": Entry(
        traits=AttackTraits(batching="any", minimum_norm=True, norms=_L2, leaves_ball=True, failure="input"),
        unit_space=True,
        trial={"max_iter": 30, "binary_search_steps": 3, "learning_rate": 0.1, "initial_const": 1.0},
    ),
    "CarliniLInfMethod": Entry(
        traits=AttackTraits(batching="single", minimum_norm=True, norms=_LINF, leaves_ball=True, failure="input"),
        unit_space=True,
        trial={"max_iter": 5, "learning_rate": 0.1, "initial_const": 1.0, "largest_const": 5.0},
    ),
    "CompositeAdversarialAttackPyTorch": Entry(
        traits=replace(_TRANSFORMED, packages=("kornia",)),
        unit_space=True,
        trial_norm="l2",
        fill=settings.composite,
        trial={"max_iter": 2, "max_inner_iter": 2},
    ),
    "DeepFool": replace(
        _DEEPFOOL,
        defect="It multiplies each step by the width of the bounds, and overshoots where that is above 1; it is run "
        "on inputs in [0, 1].",
    ),
    "ElasticNet": Entry(
        traits=AttackTraits(batching="full", minimum_norm=True, norms=("l1", "l2"), leaves_ball=True, failure="input"),
        unit_space=True,
        trial={"max_iter": 10, "binary_search_steps": 3, "initial_const": 1.0},
    ),
    "FastGradientMethod": replace(_DESCENT, trial={}),
    "FeatureAdversariesNumpy": replace(_FEATURES, traits=replace(_FEATURES.traits, batching="single", gradients=False)),
    "FeatureAdversariesPyTorch": replace(_FEATURES, trial={"max_iter": 5}),
    "GRAPHITEBlackbox": replace(
        _STICKER,
        traits=replace(_STICKER.traits, gradients=False, references=True),
        guides="x_tar",
        trial={"num_xforms_mask": 2, "num_xforms_boost": 2, "num_boost_queries": 20, "heat_patch_stride": (2, 2)},
    ),
    "GRAPHITEWhiteboxPyTorch": replace(_STICKER, trial={"num_xforms": 2, "steps": 2, "first_steps": 3}),
    "GeoDA": Entry(
        traits=replace(_SINGLE_L2, norms=NORMS, starting_points=True),
        unit_space=True,
        starts=True,
        trial={"max_iter": 500, "sub_dim": 4},
    ),
    "HopSkipJump": Entry(
        traits=replace(_SINGLE_L2, norms=("linf", "l2"), failure="input", seeds="own"),
        trial={"max_iter": 5, "max_eval": 100, "init_eval": 20},
        defect="It attacks what the model predicts, not the label.",
    ),
    "LaserAttack": Entry(
        traits=replace(_TRANSFORMED, gradients=False, failure="input"),
        unit_space=True,
        indices=True,
        channels_last=True,
        channels=3,
        fill=settings.laser,
        trial={"iterations": 10},
    ),
    "MomentumIterativeMethod": _DESCENT,
    # Its step is made for probabilities: on logits it hardly ever reaches the boundary.
    "NewtonFool": replace(_DEEPFOOL, probabilities=True, trial={"max_iter": 100, "eta": 0.1}),
    "PixelAttack": Entry(
        traits=replace(_PIXELS, norms=_L1, leaves_ball=True),
        unit_space=True,
        fill=settings.pixels,
        trial={"max_iter": 2},
    ),
    "ProjectedGradientDescent": _DESCENT,
    "ProjectedGradientDescentNumpy": _DESCENT,
    "ProjectedGradientDescentPyTorch": _DESCENT,
    "RescalingAutoConjugateGradient": _CONJUGATE,
    "SaliencyMapMethod": Entry(
        traits=AttackTraits(batching="any", minimum_norm=True, norms=_L1, leaves_ball=True),
        unit_space=True,
        distances=("theta",),
        aims=True,
    ),
    "ShadowAttack": Entry(
        traits=_TRANSFORMED,
        unit_space=True,
        aims=True,
        trial={"nb_steps": 50, "batch_size": 4},
        trial_norm="l2",
        defect="It takes labels as targets whatever targeted is; it is given the class that comes second.",
    ),
    "SignOPTAttack": Entry(
        traits=replace(_SINGLE_L2, minimum_classes=3, failure="input"),
        unit_space=True,
        trial={"max_iter": 2, "num_trial": 5, "k": 5},
    ),
    "SimBA": Entry(
        traits=_SINGLE_L2, probabilities=True, unit_space=True, distances=("epsilon",), trial={"max_iter": 200}
    ),
    "SpatialTransformation": Entry(
        traits=replace(_TRANSFORMED, gradients=False, failure="input", seeds="none"),
        unit_space=True,
        fill=settings.spatial,
        defect="It counts the steps down the image by the number of channels, so that it hardly shifts it that way.",
        trial={"num_translations": 3, "num_rotations": 3},
    ),
    # Its l1 form returns the inputs as they are.
    "SquareAttack": Entry(
        traits=AttackTraits(
            batching="any", batch_dependent=True, gradients=False, norms=("linf", "l2"), failure="best"
        ),
        trial={"max_iter": 40},
        defect="In l2 it divides windows by their share of the budget, and by zero: weak, with queries that are NaN.",
    ),
    "TargetedUniversalPerturbation": Entry(
        traits=_UNIVERSAL,
        unit_space=True,
        aims=True,
        fill=settings.targeted_universal,
        trial={"max_iter": 2},
        defect="The attack inside moves away from the target unless attacker_params say targeted; they do here.",
    ),
    "ThresholdAttack": Entry(
        traits=replace(_PIXELS, norms=_LINF), unit_space=True, fill=settings.threshold, trial={"max_iter": 2}
    ),
    "UniversalPerturbation": Entry(traits=_UNIVERSAL, unit_space=True, trial={"max_iter": 2}),
    "VirtualAdversarialMethod": Entry(
        defect="Its finite difference of 1e-6 is lost in float32; set finite_diff=1e-3.",
        traits=AttackTraits(batching="full", gradients=False, norms=_L2, leaves_ball=True),
        probabilities=True,
        unit_space=True,
        trial={"max_iter": 5, "finite_diff": 1e-3},
    ),
    "Wasserstein": Entry(
        traits=AttackTraits(batching="full", batch_dependent=True, leaves_ball=True, normless=True),
        defect="At its default regularization of 3000 it returns NaN for some images, and for more of them in a batch; "
        "set regularization=300.",
        unit_space=True,
        fill=settings.wasserstein,
        trial={"max_iter": 20, "kernel_size": 3, "regularization": 10, **_SINKHORN},
        trial_norm="l2",
    ),
    "ZooAttack": Entry(
        traits=_SINGLE_L2,
        unit_space=True,
        trial={"max_iter": 50, "nb_parallel": 32, "learning_rate": 0.1, "binary_search_steps": 2, **_WHOLE},
    ),
}
