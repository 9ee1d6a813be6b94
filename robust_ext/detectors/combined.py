"""Several detectors as one, input by input."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError
from robust_ext.core.files import replace_file
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.detectors.base import Detector
from robust_ext.detectors.combining import METHODS, combine_ranks, ranks_among
from robust_ext.detectors.observation import Observation, observe
from robust_ext.registry.detector import as_detector

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


class CombinedDetector(Detector):
    """The mean, maximum or worst-case mixture of several detectors' ranks among clean scores.

    One forward pass of the classifier serves all members. Each member's score becomes the share of clean scores below
    it (:func:`~robust_ext.detectors.combining.ranks`), so that scales do not matter, and these ranks are combined as
    :func:`~robust_ext.detectors.combining.combine_ranks` says. The mixture is that of Granese et al., "Optimal
    Zero-Shot Detector for Multi-Armed Attacks" (2024), with ranks for their probabilities.

    Order of work: fit the members (and set limits of their own, as MagNet's ``calibrate`` does), then
    :meth:`fit_clean`, then :meth:`calibrate` on other clean inputs. What changes a member's scores afterwards calls for
    both again. The thresholds of members play no part. An input that a member scores NaN gets NaN.

    Args:
        classifier: The network that all of them watch.
        detectors: One or more, each of a kind that :func:`~robust_ext.as_detector` accepts. They become parts
            of this detector, not copies.
        method: ``"mean"``, ``"max"`` or ``"mixture"``.

    Attributes:
        differentiable: Whether gradients flow from every member; ranks are piecewise smooth.
        random: Whether a member's scores are random.
        members: The detectors.
        clean: Their scores of clean inputs, in order, float64 ``(K, n)``; empty until fitted.

    Raises:
        InvalidArgumentError: A setting is not accepted, or a detector watches another classifier.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> inputs, _ = load_dataset("digits").take(range(200))
        >>> network = digits_network()
        >>> both = [lambda x: x.flatten(1).std(1), lambda x: -network(x).amax(1)]
        >>> detector = CombinedDetector(network, both, method="max")
        >>> detector.fit_clean(inputs[:100])
        >>> detector.calibrate(inputs[100:], false_positive_rate=0.05).achieved
        0.05
    """

    clean: Tensor

    def __init__(self, classifier: nn.Module, detectors: Sequence[Any], *, method: str = "mean") -> None:
        super().__init__(classifier)
        if not isinstance(detectors, (list, tuple)) or not detectors:
            shown = type(detectors).__name__ if isinstance(detectors, nn.Module) else repr(detectors)
            raise InvalidArgumentError("detectors", shown, "a list of one or more")
        self.method = check_choice("method", method, METHODS)
        self.members = tuple(
            as_detector(one, classifier, argument=f"detectors[{number}]") for number, one in enumerate(detectors)
        )
        # Modules move with the detector; eval() on the list would reach the classifier.
        self.modules_of_members = nn.ModuleList(self.members)
        self.modules_of_members.training = False
        self.layers = tuple(dict.fromkeys(name for member in self.members for name in member.layers))
        self.differentiable = all(member.differentiable for member in self.members)
        self.random = any(member.random for member in self.members)
        empty = torch.empty(len(self.members), 0, dtype=torch.float64, device=module_device(classifier))
        self.register_buffer("clean", empty)

    @property
    def settings(self) -> dict[str, Any]:
        """The method, and each member's name and settings."""
        named = [{"detector": type(member).__name__, "settings": member.settings} for member in self.members]
        return {"method": self.method, "detectors": named}

    def fit_clean(self, inputs: Tensor, *, batch_size: int = 256, seed: int = 0) -> None:
        """Take the clean scores that ranks are counted among; a threshold that was set is forgotten.

        Args:
            inputs: Clean inputs ``(N, ...)`` that no member was fitted on. A rank resolves ``1 / N``, so a few hundred.
            batch_size: Inputs scored at once.
            seed: Of members that are random; global generators are left alone.

        Raises:
            InvalidArgumentError: These are no such inputs or settings.
            ModelError: A member is not fitted, scores NaN, or scores no input a finite number.
        """
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("seed", seed, minimum=0)
        if not isinstance(inputs, Tensor) or not inputs.dim() or not len(inputs):
            raise InvalidArgumentError("inputs", "no clean inputs", "a tensor of at least one clean input")
        device = module_device(self.classifier)
        with torch.no_grad(), seeded_globals(seed):
            found = [
                self.scores_of(observe(self.classifier, batch.to(device), self.layers))
                for batch in torch.split(inputs, batch_size)
            ]
        scores = torch.cat(found).T.contiguous()
        for number, row in enumerate(scores):
            name = self._name(number)
            if bool(row.isnan().any()) or not bool(row.isfinite().any()):
                raise ModelError(
                    f"detector CombinedDetector: member {name} scored {int(row.isnan().sum())} of {len(row)} clean "
                    f"inputs NaN and {int(row.isfinite().sum())} finite, expected none and at least one; leave it out"
                )
            if len(row) > 1 and bool((row == row[0]).all()):
                logger.warning(
                    "detector CombinedDetector: member %s scored all %d clean inputs %.6g; look at its score",
                    name,
                    len(row),
                    float(row[0]),
                )
        self.clean = scores.sort(1).values
        # It belongs to the ranks among other scores.
        self.threshold = torch.tensor(torch.nan, device=device)

    def scores_of(self, seen: Observation) -> Tensor:
        """The members' own scores of a forward pass, float64 ``(N, K)``, with gradients."""
        return torch.stack([member.checked(_share(seen, member)).double() for member in self.members], 1)

    def ranks_of(self, seen: Observation) -> Tensor:
        """The members' ranks of a forward pass, float64 ``(N, K)``, with gradients.

        Raises:
            ModelError: There are no clean scores yet.
        """
        if not self.clean.numel():
            raise ModelError("detector CombinedDetector: has no clean scores; call fit_clean(clean_inputs) first")
        columns = self.scores_of(seen).unbind(1)
        return torch.stack([ranks_among(own, clean) for own, clean in zip(columns, self.clean, strict=True)], 1)

    def score_of(self, seen: Observation) -> Tensor:
        """The combined rank in [0, 1], ``(N,)``.

        Raises:
            ModelError: There are no clean scores yet, or a member is not fitted.
        """
        return combine_ranks(self.ranks_of(seen).T, method=self.method).to(seen.inputs.dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the clean scores, the threshold and all members to one safetensors file, without the classifier.

        Args:
            path: The file.

        Raises:
            ModelError: A member wraps code of yours, which no file can hold.
        """
        values, members = {"threshold": self.threshold, "clean": self.clean}, []
        with tempfile.TemporaryDirectory() as folder:
            for number, member in enumerate(self.members):
                file = Path(folder) / f"{number}.safetensors"
                # Through its own method, as a member may refuse.
                member.save(file)
                about, tensors = _read(file)
                members.append(about)
                values.update({f"{number}.{name}": value for name, value in tensors.items()})
            about = {
                "detector": type(self).__name__,
                "settings": json.dumps({"method": self.method}),
                "members": json.dumps(members),
            }
            replace_file(Path(path), safetensors.torch.save(values, metadata=about))

    @classmethod
    def load(cls, path: str | os.PathLike[str], classifier: nn.Module, *, kinds: Sequence[type[Detector]] = ()) -> Self:
        """Read what :meth:`save` wrote.

        Args:
            path: The file.
            classifier: The network that it watched.
            kinds: Classes of members that are not in :mod:`robust_ext.detectors`.

        Raises:
            DataError: The file cannot be read, holds another detector, or a member of an unknown class.
        """
        about, values = _read(path)
        if about.get("detector") != cls.__name__:
            raise DataError(f"{path}: holds {about.get('detector') or 'no detector'}, expected {cls.__name__}")
        if not {"threshold", "clean"} <= values.keys() or "members" not in about:
            raise DataError(f"{path}: holds {sorted(values)}, expected 'clean', 'threshold' and members")
        members = []
        with tempfile.TemporaryDirectory() as folder:
            for number, one in enumerate(json.loads(about["members"])):
                own = {name.partition(".")[2]: v for name, v in values.items() if name.startswith(f"{number}.")}
                file = Path(folder) / f"{number}.safetensors"
                file.write_bytes(safetensors.torch.save(own, metadata=one))
                try:
                    members.append(_loader(one["detector"], kinds)(file, classifier))
                except DataError as error:
                    raise DataError(f"{path}: member {number}, {one['detector']}, cannot be read ({error})") from error
        detector = cls(classifier, members, **json.loads(about["settings"]))
        device = module_device(classifier)
        detector.threshold, detector.clean = values["threshold"].to(device), values["clean"].to(device)
        return detector

    def _name(self, number: int) -> str:
        return f"{number} ({getattr(self.members[number], 'name', type(self.members[number]).__name__)})"


def _share(seen: Observation, member: Detector) -> Observation:
    """A forward pass as a member alone would see it."""
    return Observation(seen.inputs, seen.logits, {name: seen.layers[name] for name in member.layers})


def _loader(name: str, kinds: Sequence[type[Detector]]) -> Callable[[Path, nn.Module], Detector]:
    """What reads a member of a class of that name."""
    # Looked up late, as the package imports this file.
    public = vars(importlib.import_module("robust_ext.detectors")).values()
    known = [kind for kind in (*public, CombinedDetector, *kinds) if isinstance(kind, type)]
    found = next((kind for kind in known[::-1] if kind.__name__ == name and issubclass(kind, Detector)), None)
    if found is None:
        raise DataError("its class is unknown; give it in kinds")
    return functools.partial(found.load, kinds=kinds) if issubclass(found, CombinedDetector) else found.load


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """What a file says of itself, and its tensors."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise DataError(f"{path}: no file written by Detector.save ({error})") from error
