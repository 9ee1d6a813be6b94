"""Feature matching: looking, to the layers that a detector watches, like a clean point of another class.

Sources: Sabour, Cao, Faghri, Fleet, "Adversarial Manipulation of Deep Representations" (2016), section 3, for linf and
one layer; Tramer, Carlini, Brendel, Madry, "On Adaptive Attacks to Adversarial Example Defenses" (2020), for its use
against detectors; Zimmermann et al., "Increasing Confidence in Adversarial Robustness Evaluations" (2022), section 4.1,
who add a term for the classifier, and make 500 steps of 0.0012 at epsilon 0.03.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from robust_ext.attacks._common.detector_aware import AttackProblem, no_classifier_gradients
from robust_ext.attacks._common.matching import MatchingAttack, MatchingLoss, averaged
from robust_ext.attacks._common.rows import gradient_of
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, ModelError
from robust_ext.core.settings import setting, settings_class
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import observe
from robust_ext.models.features import split

Features = str | Sequence[str] | Callable[[Tensor], Tensor] | None
FeatureMap = Callable[[Tensor], list[Tensor]]

# Differences of zero have no scale; every other difference is far above.
_LEAST = 1e-12


def _check_features(features: object) -> Features:
    if isinstance(features, str) or callable(features):
        return features
    if isinstance(features, Sequence) and features and all(isinstance(name, str) for name in features):
        return tuple(features)
    expected = "names of layers of the detector's classifier, a callable x -> (N, F), or None"
    raise InvalidArgumentError("features", repr(features), expected)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l2": lambda a, b: (a - b).square().sum(1),
    "linf": lambda a, b: (a - b).abs().amax(1),
    "cosine": lambda a, b: 1 - torch.nn.functional.cosine_similarity(a, b, dim=1),
}


@settings_class
class FeatureMatching(MatchingAttack):
    """Projected gradient steps that pull the features of each row to those of a reference point.

    Maximised is ``weight x min(margin, confidence) / r - distance(features(x), features(reference)) / d``, where r is
    the range of the logits and d the distance, both at the input, so that the terms are alike in size regardless of the
    network. Each layer's features are divided by the length of the references' features there. The detector's score
    is not followed, and needs no gradients; which of the points is kept, see :class:`MatchingAttack`.

    Each step is one forward and one backward pass through the features for each of the ``samples``, with a ``weight``
    one forward and backward pass more through the classifier, and ``samples`` forward passes more where a point is
    evaluated. Before, inputs and references go forward once each through features and classifier, and the inputs once
    more with a ``weight``.

    Targets need a detector and references (:attr:`Target.references`), of which the misclassification is to come: for
    targeted attacks they should be of the classes aimed at.

    Example:
        >>> FeatureMatching(features=["layer3", "layer4"], distance="cosine", steps=100).features
        ('layer3', 'layer4')
    """

    name = "FeatureMatching"

    features: Features = setting(
        default=None,
        help="Names of layers of the detector's classifier, as in ``classifier.named_modules()``, one or more; or a "
        "callable from inputs ``(N, ...)`` to features ``(N, F)``. Left out: the detector's method ``features`` where "
        "it has one, or else what enters its classifier's last linear layer.",
        check=_check_features,
    )
    distance: str = setting(
        default="l2",
        help='``"l2"`` (squared), ``"linf"`` or ``"cosine"``.',
        choices=tuple(DISTANCES),
        foolbox="feature_distance",
    )
    weight: float = setting(default=1.0, help="Weight of the classifier's term.", minimum=0)
    steps: int = setting(default=500)
    rel_step_size: float = setting(default=0.04)

    def loss(self, problem: AttackProblem) -> MatchingLoss:
        """See :meth:`MatchingAttack.loss`."""
        assert problem.references is not None
        features = feature_map(problem.defended.detector, self.features, problem.inputs[:1])
        classifier, distance = problem.defended.classifier, DISTANCES[self.distance]
        with torch.no_grad():
            # One batch in row order for each reference: the features may depend on the row.
            groups = [features(points.clone()) for points in problem.references.unbind(1)]
            own = features(problem.inputs.clone())
            lengths = [torch.stack(parts).norm(dim=2).mean(0) for parts in zip(*groups, strict=True)]
            scales = [length.clamp_min(_LEAST)[:, None] for length in lengths]
            mine = _joined(own, scales)
            wanted = self.choose_reference(problem, [_joined(group, scales) for group in groups], mine)
            far = distance(mine, wanted).clamp_min(_LEAST)
            logits = classifier(problem.inputs.clone()) if self.weight else torch.zeros(1, 1)
            width = (logits.amax(1) - logits.amin(1)).clamp_min(_LEAST)
        missing = AttackRefusedError(
            "FeatureMatching: the features give no gradients; name others, or choose an attack that queries decisions "
            "only"
        )

        def once(points: Tensor) -> tuple[Tensor, Tensor]:
            x = points.detach().clone().requires_grad_(True)
            value = -distance(_joined(features(x), scales), wanted) / far
            gradient = gradient_of(value, x, missing)
            if self.weight:
                y = points.detach().clone().requires_grad_(True)
                extra = self.weight * self.gain(problem, classifier(y)) / width
                gradient = gradient + gradient_of(extra, y, no_classifier_gradients("FeatureMatching"))
                value = value + extra
            return value.detach(), gradient

        return lambda points: averaged(once(points) for _ in range(self.samples))


def _joined(groups: list[Tensor], scales: list[Tensor]) -> Tensor:
    return torch.cat([group / scale for group, scale in zip(groups, scales, strict=True)], 1)


def feature_map(detector: Detector, features: Features, example: Tensor) -> FeatureMap:
    """From inputs ``(N, ...)`` to one or more groups of features, ``(N, F)`` each.

    The ``example`` ``(1, ...)`` is used only to find the last linear layer: an AttackRefusedError where nothing is
    named, and there is neither a method nor such a layer.
    """
    method: object = getattr(detector, "features", None)
    if features is None and inspect.ismethod(method):
        features = method
    if features is None:
        try:
            features = split(detector.classifier, example).features
        except ModelError as error:
            raise AttackRefusedError(
                f"FeatureMatching: no features were named and the last linear layer was not found ({error}); name "
                "layers of the detector's classifier, as in FeatureMatching(features=['layer4'])"
            ) from error
    if not isinstance(features, (str, Sequence)):
        function = features
        return lambda x: [_flat(function(x), x, "features")]
    names = (features,) if isinstance(features, str) else tuple(features)

    def of_layers(x: Tensor) -> list[Tensor]:
        seen = observe(detector.classifier, x, names)
        return [_flat(seen.layers[name], x, f"layer {name!r}") for name in names]

    return of_layers


def _flat(out: object, x: Tensor, which: str) -> Tensor:
    if not isinstance(out, Tensor) or out.dim() < 2 or len(out) != len(x):
        shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
        raise InvalidArgumentError("features", f"{shown} from {which} for {len(x)} inputs", f"shape ({len(x)}, F)")
    return out.flatten(1)
