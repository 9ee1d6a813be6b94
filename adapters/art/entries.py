"""Data on ART's evasion attacks: one entry for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from robust_ext.adapters.art import settings
from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.settings import AttackContext
from robust_ext.adapters.catalogue import make_entry
from robust_ext.registry.base import AttackListing


@dataclass(frozen=True, kw_only=True)
class Entry(AttackListing):
    """The data on a class besides its listing.

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
        tree: Whether it reads the nodes of a decision tree of scikit-learn, and runs on such models alone.
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
    tree: bool = False
    fill: Callable[[AttackContext], Mapping[str, Any]] = settings.nothing


_row = partial(make_entry, Entry)
_EVASION = art.attacks.evasion
_FEW = "max_iter=10"
_DESCENT = _row("full", _FEW)
_DEEPFOOL = "l2 full minimum_norm leaves_ball unit_space"
# These start with steps of twice eps_step and only shorten them; the papers start with twice epsilon.
_AUTO = _row("any batch_dependent start", "max_iter=20, nb_random_init=1", first_step=1.0)
_CONJUGATE = replace(
    _AUTO,
    trial_norm="l2",
    defect="In linf it never takes the sign of its direction, and finds little (.05 where APGD found .88); use "
    "AutoProjectedGradientDescent.",
)
_BLIND = "single black-box minimum_norm leaves_ball"
_TRANSFORMED = "single leaves_ball normless unit_space"
_PATCH = partial(_row, f"{_TRANSFORMED} aims patch", fill=settings.patch)
_STICKER = partial(_row, packages="cv2", trial_norm="l1", fill=settings.image_size)
_FEATURES = partial(_row, distances=("delta", "step_size"), guides="y", fill=settings.features)
_PREDICTED = "It attacks what the model predicts, not the label."
_UNIVERSAL = "single leaves_ball unit_space"

ENTRIES: Mapping[str, Entry] = {
    "AdversarialPatch": _PATCH(_FEW, packages="torchvision"),
    "AdversarialPatchNumpy": _PATCH("max_iter=20", trial_norm="l1"),
    "AdversarialPatchPyTorch": _PATCH(_FEW, packages="torchvision"),
    "AutoAttack": _row(
        "any batch_dependent input leaves_ball unit_space",
        {
            "attacks": [
                (_EVASION.AutoProjectedGradientDescent, {"max_iter": 5, "nb_random_init": 1}),
                (_EVASION.SquareAttack, {"max_iter": 10}),
            ]
        },
        classes=3,
        packages="multiprocess",
        first_step=1.0,
        defect="It runs DeepFool where the published AutoAttack runs FAB.",
    ),
    "AutoConjugateGradient": _CONJUGATE,
    "AutoProjectedGradientDescent": _AUTO,
    "BasicIterativeMethod": _row("linf full", _FEW),
    "BoundaryAttack": _row(f"l2 {_BLIND} input own", "max_iter=100", defect=_PREDICTED),
    "BrendelBethgeAttack": _row(
        "single minimum_norm leaves_ball input starting_points starts",
        "steps=10",
        packages="numba",
        guides="starting_points",
    ),
    "CarliniL0Method": _row(
        "l1 any minimum_norm leaves_ball input unit_space",
        "max_iter=20, binary_search_steps=3, learning_rate=0.1, initial_const=1.0",
        misses="it changes few values, by as much as the bounds allow",
    ),
    "CarliniL2Method": _row(
        "l2 any minimum_norm leaves_ball input unit_space",
        "max_iter=30, binary_search_steps=3, learning_rate=0.1, initial_const=1.0",
    ),
    "CarliniLInfMethod": _row(
        "linf single minimum_norm leaves_ball input unit_space",
        "max_iter=5, learning_rate=0.1, initial_const=1.0, largest_const=5.0",
    ),
    "CompositeAdversarialAttackPyTorch": _row(
        _TRANSFORMED, "max_iter=2, max_inner_iter=2", packages="kornia", trial_norm="l2", fill=settings.composite
    ),
    "DecisionTreeAttack": _row(
        "full black-box minimum_norm leaves_ball tree",
        reason="it reads decision trees of scikit-learn, and runs on those alone; use HopSkipJump on other models",
    ),
    "DeepFool": _row(
        _DEEPFOOL,
        _FEW,
        defect="It multiplies each step by the width of the bounds, and overshoots where that is above 1; it is run "
        "on inputs in [0, 1].",
    ),
    "ElasticNet": _row(
        "l1 l2 full minimum_norm leaves_ball input unit_space", "max_iter=10, binary_search_steps=3, initial_const=1.0"
    ),
    "FastGradientMethod": _row("full"),
    "FeatureAdversariesNumpy": _FEATURES("linf single black-box references leaves_ball unit_space"),
    "FeatureAdversariesPyTorch": _FEATURES("linf full references leaves_ball unit_space", "max_iter=5"),
    "GRAPHITEBlackbox": _STICKER(
        f"{_TRANSFORMED} aims input black-box references",
        "num_xforms_mask=2, num_xforms_boost=2, num_boost_queries=20, heat_patch_stride=(2, 2)",
        guides="x_tar",
    ),
    "GRAPHITEWhiteboxPyTorch": _STICKER(f"{_TRANSFORMED} aims input", "num_xforms=2, steps=2, first_steps=3"),
    "GeoDA": _row(f"{_BLIND} starting_points starts unit_space", "max_iter=500, sub_dim=4"),
    "HopSkipJump": _row(f"linf l2 {_BLIND} input own", "max_iter=5, max_eval=100, init_eval=20", defect=_PREDICTED),
    "LaserAttack": _row(
        f"{_TRANSFORMED} black-box input indices channels_last", "iterations=10", channels=3, fill=settings.laser
    ),
    "MomentumIterativeMethod": _DESCENT,
    # Its step is made for probabilities: on logits it hardly ever reaches the boundary.
    "NewtonFool": _row(f"{_DEEPFOOL} probabilities", "max_iter=100, eta=0.1"),
    "PixelAttack": _row(
        "l1 single black-box input leaves_ball unit_space", "max_iter=2", classes=3, fill=settings.pixels
    ),
    "ProjectedGradientDescent": _DESCENT,
    "ProjectedGradientDescentNumpy": _DESCENT,
    "ProjectedGradientDescentPyTorch": _DESCENT,
    "RescalingAutoConjugateGradient": _CONJUGATE,
    "SaliencyMapMethod": _row("l1 any minimum_norm leaves_ball unit_space aims", distances=("theta",)),
    "ShadowAttack": _row(
        f"{_TRANSFORMED} aims",
        "nb_steps=50, batch_size=4",
        trial_norm="l2",
        defect="It takes labels as targets even with targeted=False; it is given the second most likely class.",
    ),
    "SignOPTAttack": _row(f"l2 {_BLIND} input unit_space", "max_iter=2, num_trial=5, k=5", classes=3),
    "SimBA": _row(f"l2 {_BLIND} probabilities unit_space", "max_iter=200", distances=("epsilon",)),
    "SpatialTransformation": _row(
        f"{_TRANSFORMED} black-box input none",
        "num_translations=3, num_rotations=3",
        fill=settings.spatial,
        defect="It counts the steps down the image by the number of channels, so that it hardly shifts it that way.",
    ),
    # Its l1 form returns the inputs as they are.
    "SquareAttack": _row(
        "linf l2 any batch_dependent black-box best",
        "max_iter=40",
        defect="In l2 it divides windows by their share of the budget, and by zero: weak, with queries that are NaN.",
    ),
    "TargetedUniversalPerturbation": _row(
        f"{_UNIVERSAL} aims",
        "max_iter=2",
        fill=settings.targeted_universal,
        defect="The attack inside moves away from the target unless attacker_params say targeted; they do here.",
    ),
    "ThresholdAttack": _row("linf single black-box input unit_space", "max_iter=2", classes=3, fill=settings.threshold),
    "UniversalPerturbation": _row(_UNIVERSAL, "max_iter=2"),
    "VirtualAdversarialMethod": _row(
        "l2 full black-box leaves_ball probabilities unit_space",
        "max_iter=5, finite_diff=1e-3",
        defect="Its finite difference of 1e-6 is lost in float32; set finite_diff=1e-3.",
    ),
    "Wasserstein": _row(
        "full batch_dependent leaves_ball normless unit_space",
        "max_iter=20, kernel_size=3, regularization=10, conjugate_sinkhorn_max_iter=30, projected_sinkhorn_max_iter=30",
        trial_norm="l2",
        fill=settings.wasserstein,
        defect="At its default regularization of 3000 it returns NaN for some images, and for more of them in a batch; "
        "set regularization=300.",
    ),
    "ZooAttack": _row(
        f"l2 {_BLIND} unit_space",
        "max_iter=50, nb_parallel=32, learning_rate=0.1, binary_search_steps=2, use_resize=False, use_importance=False",
    ),
}

_VIDEO = "it is made for videos; use ProjectedGradientDescent"
_AUDIO = "it is made for speech recognisers; use ProjectedGradientDescent"
_DETECTION = "it is made for object detectors; use ProjectedGradientDescent"
_TENSORFLOW = "it is made for TensorFlow; use the PyTorch form of the same attack"
UNUSABLE: Mapping[str, str] = {
    "AdversarialPatchTensorFlowV2": _TENSORFLOW,
    "AdversarialTexturePyTorch": "it is made for object trackers in videos; use AdversarialPatchPyTorch",
    "CarliniWagnerASR": _AUDIO,
    "DPatch": _DETECTION,
    "FeatureAdversariesTensorFlowV2": _TENSORFLOW,
    "FrameSaliencyAttack": "it is made for videos; use the attack it would wrap",
    "HighConfidenceLowUncertainty": "it is made for Gaussian process classifiers of GPy; use CarliniL2Method",
    "ImperceptibleASR": _AUDIO,
    "ImperceptibleASRPyTorch": _AUDIO,
    "LowProFool": "it is made for tables: its samples are vectors with weighted columns; use CarliniL2Method",
    "MalwareGDTensorFlow": "it is made for bytes of programs, in TensorFlow; use ProjectedGradientDescent",
    "OverTheAirFlickeringPyTorch": _VIDEO,
    "OverloadPyTorch": _DETECTION,
    "ProjectedGradientDescentTensorFlowV2": _TENSORFLOW,
    "RobustDPatch": _DETECTION,
    "SNAL": _DETECTION,
}
