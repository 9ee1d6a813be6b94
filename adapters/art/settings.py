"""Settings of ART attacks that are left out, where ART has no default or one that does nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from robust_ext.adapters.art.library import art
from robust_ext.core.threat import ThreatModel


@dataclass(frozen=True, kw_only=True)
class AttackContext:
    """The setting of an attack that is about to run.

    ``inputs`` are float32 ``(N, ...)``; they and the threat model are in unit space where the attack is run there, and
    ``unit`` is what one unit of them is in the units of the target's bounds. With ``aims`` labels are targets.
    """

    inputs: Tensor
    threat_model: ThreatModel
    unit: float = 1.0
    aims: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])


Filled = Mapping[str, Any]


def nothing(context: AttackContext) -> Filled:
    """Keep ART's own defaults."""
    return {}


def composite(context: AttackContext) -> Filled:
    """Limit its descent in linf to epsilon; leave hue and saturation out for images without colours."""
    filled: dict[str, Any] = {}
    if context.threat_model.norm == "linf":
        reach = min(context.threat_model.epsilon, 1.0)
        filled["pgd_epsilon"] = (-reach, reach)
    if context.shape[0] != 3:
        filled["enabled_attack"] = (2, 3, 4, 5)
    return filled


def features(context: AttackContext) -> Filled:
    """Imitate the logits within epsilon, in steps of a tenth of it (both forms)."""
    epsilon = context.threat_model.epsilon
    return {"delta": float(epsilon), "layer": -1, "step_size": epsilon / 10}


def image_size(context: AttackContext) -> Filled:
    """Return width and height of the images."""
    size = (context.shape[2], context.shape[1])
    return {"net_size": size, "noise_size": size}


def laser(context: AttackContext) -> Filled:
    """Allow beams of any colour and slope, at most as wide and as far from the corner as the image is wide."""
    module = art.attacks.evasion.laser_attack.laser_attack
    beam, width = module.LaserBeam, float(context.shape[2])
    darkest, brightest = beam.from_array([380.0, 0.0, 1.0, 1.0]), beam.from_array([780.0, math.pi, width, width])
    return {"iterations": 50, "laser_generator": module.LaserBeamGenerator(darkest, brightest)}


def patch(context: AttackContext) -> Filled:
    """Search at the image's size for patches of up to two fifths of its sides."""
    channels, height, width = context.shape
    side = min(height, width)
    return {"patch_shape": (channels, side, side), "scale_min": 0.2, "scale_max": 0.4}


def pixels(context: AttackContext) -> Filled:
    """Count the pixels that epsilon allows to change from one bound to the other, at least one."""
    return {"th": max(1, int(context.threat_model.epsilon / context.shape[0] / context.threat_model.width))}


def spatial(context: AttackContext) -> Filled:
    """Shift by up to a tenth of the image and turn by up to 30 degrees, as Engstrom et al. (2019), section 4.

    ART's own defaults shift and turn by nothing.
    """
    return {"max_translation": 10.0, "num_translations": 5, "max_rotation": 30.0, "num_rotations": 31}


def targeted_universal(context: AttackContext) -> Filled:
    """Make the inner attack targeted: by default it takes the target for the true label and moves away from it."""
    norm = {"linf": math.inf, "l2": 2, "l1": 1}[context.threat_model.norm]
    return {"attacker_params": {"targeted": True, "eps": context.threat_model.epsilon, "norm": norm}}


def threshold(context: AttackContext) -> Filled:
    """Count the steps of 1/255 that stay within epsilon, at least one.

    ART rounds every changed value down to a whole step, so that an input between two steps moves by up to the
    difference more than the threshold; that difference is taken off.
    """
    steps = context.inputs.detach().float() * 255  # in float32, as ART: whether a value is on a step is its rounding
    between = float((steps - steps.floor()).max()) if steps.numel() else 0.0
    return {"th": max(1, math.floor(context.threat_model.epsilon * 255 - between + 1e-3)), "es": 1}


def wasserstein(context: AttackContext) -> Filled:
    """Measure ball and steps in Wasserstein distance, as ART does, regardless of the norm."""
    return {"norm": "wasserstein", "ball": "wasserstein", "eps": 0.3, "eps_step": 0.1}
