"""What "features" means to feature matching: layers of a network, a method of its detector, or any function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

from torch import Tensor

from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, ModelError
from robust_ext.detectors.base import Detector
from robust_ext.detectors.observation import observe
from robust_ext.models.features import split

Features = str | Sequence[str] | Callable[[Tensor], Tensor] | None
FeatureMap = Callable[[Tensor], list[Tensor]]


def check_features(features: object) -> Features:
    """Return a choice of features as it came, lists as tuples.

    Raises:
        InvalidArgumentError: It is none.
    """
    if features is None or isinstance(features, str) or callable(features):
        return features
    if isinstance(features, Sequence) and features and all(isinstance(name, str) for name in features):
        return tuple(features)
    raise InvalidArgumentError(
        "features", features, "names of layers of the detector's classifier, a callable x -> (N, F), or None"
    )


def feature_map(detector: Detector, features: Features, example: Tensor) -> FeatureMap:
    """From inputs ``(N, ...)`` to one or more groups of features, ``(N, F)`` each.

    Args:
        detector: Whose classifier's layers are meant.
        features: As :class:`robust_ext.attacks.feature_matching.FeatureMatching` takes them.
        example: One input, ``(1, ...)``; looked at only to find the last linear layer.

    Raises:
        AttackRefusedError: Nothing is named, and there is neither a method nor a last linear layer.
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
