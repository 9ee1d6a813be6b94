"""The catalogue of ART's evasion attacks by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from robust_ext.adapters.art.entries import ENTRIES, Entry
from robust_ext.adapters.art.library import art
from robust_ext.adapters.catalogue import Catalogue
from robust_ext.attacks.base import AttackTraits
from robust_ext.core.errors import InvalidArgumentError

NORM_VALUES: Mapping[str, float] = {"linf": float("inf"), "l2": 2, "l1": 1}
NORM_NAMES: Mapping[Any, str] = {"inf": "linf", **{value: norm for norm, value in NORM_VALUES.items()}}

_VIDEO = "it is made for videos; use ProjectedGradientDescent"
_AUDIO = "it is made for speech recognisers; use ProjectedGradientDescent"
_DETECTION = "it is made for object detectors; use ProjectedGradientDescent"
_TENSORFLOW = "it is made for TensorFlow; use the PyTorch form of the same attack"
UNUSABLE: Mapping[str, str] = {
    "AdversarialPatchTensorFlowV2": _TENSORFLOW,
    "AdversarialTexturePyTorch": "it is made for object trackers in videos; use AdversarialPatchPyTorch",
    "CarliniWagnerASR": _AUDIO,
    "DPatch": _DETECTION,
    "DecisionTreeAttack": "it is made for decision trees of scikit-learn; use HopSkipJump",
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

CATALOGUE = Catalogue(
    library="art",
    place="art.attacks.evasion",
    members={
        name: member
        for name, member in inspect.getmembers(art.attacks.evasion, inspect.isclass)
        if issubclass(member, art.attacks.EvasionAttack)
    },
    base=art.attacks.EvasionAttack,
    entries=ENTRIES,
    unusable=UNUSABLE,
    # Of classes of others nothing is known, so nothing is assumed that could mix up samples.
    others=Entry(traits=AttackTraits(batching="single")),
)


def traits_of(entry: Entry, settings: Mapping[str, Any]) -> AttackTraits:
    """Return the traits of a class under these settings; InvalidArgumentError for a wrong norm."""
    norms = entry.traits.norms
    if NORM_NAMES.get(settings.get("norm")) not in (None, *norms):
        raise InvalidArgumentError("attack", f"norm={settings['norm']!r}", f"a norm among {', '.join(norms)}")
    losses = [settings.get("loss_type")]
    classes = entry.traits.minimum_classes
    for part in settings.get("attacks") or ():
        losses.append(part[1].get("loss_type") if isinstance(part, tuple) else getattr(part, "loss_type", None))
        classes = 2
    return replace(entry.traits, minimum_classes=3 if "difference_logits_ratio" in losses else classes)
