"""The conversion of objects and names to detectors.

A detector of your own is a class with one method:

    >>> import torch
    >>> from robust_ext.detectors import Detector
    >>> class Unsure(Detector):
    ...     "Small distance between the two largest logits."
    ...
    ...     def score_of(self, observed):
    ...         first, second = observed.logits.topk(2).values.unbind(1)
    ...         return second - first
    >>> classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3)).eval()
    >>> detector = as_detector(Unsure, classifier)
    >>> calibration = detector.calibrate(torch.rand(100, 1, 2, 2), false_positive_rate=0.05)
    >>> calibration.achieved
    0.05
"""

from __future__ import annotations

from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.detectors.base import Detector
from robust_ext.detectors.catalogue import DETECTORS
from robust_ext.detectors.scored import ScoreDetector
from robust_ext.registry import base as libraries
from robust_ext.registry.base import made_by, named_object, same_logits, takes_classifier

_ACCEPTED = (
    "a Detector, a callable score x -> (N,), a factory (classifier) -> Detector, a detector of an adapted library, or "
    "a string such as 'file.py:make'"
)


def as_detector(
    obj: object, classifier: nn.Module, *, inputs: Tensor | None = None, argument: str = "detector"
) -> Detector:
    """Turn anything that detects into a :class:`Detector` of a classifier.

    Args:
        obj: A :class:`Detector`; a score ``x -> (N,)``, as a function or module, which may have the attributes
            ``differentiable`` (default True) and ``random`` (default False); a factory of any of these: a class, or a
            function whose first parameter is called ``classifier``, ``model``, ``network`` or ``static``; a detector of
            an adapted library or of pytorch-ood; or a string that names one of these, ``package.module:object`` or
            ``file.py:object``, where parentheses with arguments are a call.
        classifier: The network that is watched, from inputs to logits.
        inputs: A few inputs. A detector of another module is accepted only if both have the same logits of these;
            without them, only if it is the same module.
        argument: What error messages call it.

    Raises:
        InvalidArgumentError: ``obj`` is something else, or watches another classifier.

    Example:
        >>> import torch
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval()
        >>> as_detector(lambda x: x.flatten(1).std(1), network).score(torch.zeros(2, 4))
        tensor([0., 0.])
    """
    if not isinstance(classifier, nn.Module):
        raise InvalidArgumentError("classifier", type(classifier).__name__, "a torch.nn.Module from inputs to logits")
    if isinstance(obj, str):
        if obj.partition("(")[0] in DETECTORS:
            raise InvalidArgumentError(
                argument,
                obj,
                "code that makes a fitted detector of a classifier, file.py:make; detectors by name are for MEAD "
                f"(robust-ext mead --detector {obj.partition('(')[0]}), which fits them",
            )
        found = named_object(obj, accepted=_ACCEPTED, argument=argument)
        return as_detector(found, classifier, inputs=inputs, argument=argument)
    if isinstance(obj, Detector):
        _check_watches(obj, classifier, inputs, argument)
        return obj
    if isinstance(obj, type) or takes_classifier(obj):
        made = made_by(obj, classifier, accepted=_ACCEPTED, argument=argument)
        return as_detector(made, classifier, inputs=inputs, argument=argument)
    for adapter in libraries.adapters().values():
        adapted = adapter.adapt_detector(obj, classifier)
        if adapted is not None:
            return adapted
    score = obj.predict if libraries.comes_from(obj, "pytorch_ood") and hasattr(obj, "predict") else obj
    if not callable(score):
        raise InvalidArgumentError(argument, type(obj).__name__, _ACCEPTED)
    if isinstance(obj, nn.Module) and obj.training:
        raise InvalidArgumentError(
            argument, f"{type(obj).__name__} in train mode", "a score in eval mode; call its eval() first"
        )
    return ScoreDetector(
        classifier,
        score,
        name=str(getattr(obj, "__name__", type(obj).__name__)),
        differentiable=bool(getattr(obj, "differentiable", True)),
        random=bool(getattr(obj, "random", False)),
    )


def _check_watches(detector: Detector, classifier: nn.Module, inputs: Tensor | None, argument: str) -> None:
    if detector.classifier is classifier:
        return
    name = type(detector).__name__
    if inputs is None:
        raise InvalidArgumentError(
            argument,
            f"{name} beside another module, {type(detector.classifier).__name__}",
            "a detector made with this very classifier, or its class to make one",
        )
    if not same_logits(detector.classifier, classifier, inputs):
        raise InvalidArgumentError(
            argument, f"{name} beside a classifier with other logits", "a detector that watches this classifier"
        )
