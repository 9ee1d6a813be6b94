"""Several detectors as one, input by input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from robust_ext.core.errors import DataError, InvalidArgumentError, warn
from robust_ext.core.modules import buffer, module_class, positional
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import setting
from robust_ext.core.target import module_device
from robust_ext.core.validation import check_integer
from robust_ext.detectors.base import Detector, check_clean
from robust_ext.detectors.catalogue import PUBLISHED
from robust_ext.detectors.combining import METHODS, combine_ranks, ranks_among
from robust_ext.detectors.observation import Observation


@module_class
class CombinedDetector(Detector):
    """The mean, maximum or worst-case mixture of several detectors' ranks among clean scores.

    One forward pass of the classifier serves all members. Each member's score becomes the share of clean scores below
    it (:func:`~robust_ext.detectors.combining.ranks_among`), so that scales do not matter, and these ranks are combined
    by :func:`~robust_ext.detectors.combining.combine_ranks`.

    Order of work: fit the members (and set limits of their own, as MagNet's ``calibrate`` does), then
    :meth:`fit_clean`, then :meth:`calibrate` on other clean inputs. What changes a member's scores afterwards calls for
    both again. The thresholds of members play no part. An input that a member scores NaN gets NaN.

    Attributes:
        differentiable: Whether gradients flow from every member; ranks are piecewise smooth.
        random: Whether a member's scores are random.
        members: The detectors.

    Example:
        >>> from robust_ext.datasets import load_dataset
        >>> from robust_ext.demo.network import digits_network
        >>> from robust_ext.detectors import ScoreDetector
        >>> inputs, _ = load_dataset("digits").take(range(200))
        >>> network = digits_network()
        >>> scores = (lambda x: x.flatten(1).std(1), lambda x: -network(x).amax(1))
        >>> detector = CombinedDetector(network, [ScoreDetector(network, score) for score in scores], method="max")
        >>> detector.fit_clean(inputs[:100])
        >>> detector.calibrate(inputs[100:], false_positive_rate=0.05).achieved
        0.05
    """

    detectors: Sequence[Detector] = positional(
        "One or more beside that network; :func:`~robust_ext.as_detector` makes one of a score, a name or a detector "
        "of another library. They become parts of this detector, not copies.",
        kw_only=False,
    )
    method: str = setting(default="mean", help='``"mean"``, ``"max"`` or ``"mixture"``.', choices=METHODS)
    clean: Tensor = buffer(
        "The detectors' scores of clean inputs, in order, float64 ``(K, n)``; empty until fitted.", dtype=torch.float64
    )

    def __post_init__(self) -> None:
        # They are kept as ``members``.
        detectors = self.detectors
        del self.detectors
        super().__post_init__()
        if not isinstance(detectors, (list, tuple)) or not detectors:
            shown = type(detectors).__name__ if isinstance(detectors, nn.Module) else repr(detectors)
            raise InvalidArgumentError("detectors", shown, "a list of one or more")
        for number, member in enumerate(detectors):
            name = f"detectors[{number}]"
            if not isinstance(member, Detector):
                expected = f"a Detector; make it one by robust_ext.as_detector({name}, classifier)"
                raise InvalidArgumentError(name, type(member).__name__, expected)
            if member.classifier is not self.classifier:
                got = f"{type(member).__name__} beside another module, {type(member.classifier).__name__}"
                raise InvalidArgumentError(name, got, "a detector made with this very classifier")
        self.members = tuple(detectors)
        # Modules move with the detector; eval() on the list would reach the classifier.
        self.modules_of_members = nn.ModuleList(self.members)
        self.modules_of_members.training = False
        self.layers = tuple(dict.fromkeys(name for member in self.members for name in member.layers))
        self.differentiable = all(member.differentiable for member in self.members)
        self.random = any(member.random for member in self.members)

    @property
    def settings(self) -> dict[str, Any]:
        """The method, and each member's name and settings."""
        named = [{"detector": type(member).__name__, "settings": member.settings} for member in self.members]
        return {"method": self.method, "detectors": named}

    def fit_clean(self, inputs: Tensor, *, batch_size: int = 256, seed: int = 0) -> None:
        """Take the clean scores that ranks are counted among; a threshold that was set is forgotten.

        See :class:`Detector`: no member was fitted on these inputs. A rank resolves ``1 / N``, so a few hundred.
        ModelError: a member is not fitted, scores NaN, or scores no input a finite number.
        """
        check_integer("seed", seed, minimum=0)
        check_clean(inputs, batch_size)
        with seeded_globals(seed):
            scores = torch.cat(self.over_batches(inputs, self.scores_of, batch_size)).T.contiguous()
        for number, (row, member) in enumerate(zip(scores, self.members, strict=True)):
            name = f"member {number} ({getattr(member, 'name', type(member).__name__)})"
            if bool(row.isnan().any()) or not bool(row.isfinite().any()):
                raise self.error(
                    f"{name} scored {int(row.isnan().sum())} of {len(row)} clean inputs NaN and "
                    f"{int(row.isfinite().sum())} finite, expected none and at least one; leave it out"
                )
            if len(row) > 1 and bool((row == row[0]).all()):
                shown = f"{name} scored all {len(row)} clean inputs {float(row[0]):.6g}"
                warn(f"detector CombinedDetector: {shown}; look at its score")
        self.clean = scores.sort(1).values
        # It belongs to the ranks among other scores.
        self.threshold = torch.tensor(torch.nan, device=module_device(self.classifier))

    def scores_of(self, observed: Observation) -> Tensor:
        """The members' own scores of a forward pass, float64 ``(N, K)``, with gradients."""
        found = []
        for member in self.members:
            layers = {name: observed.layers[name] for name in member.layers}
            found.append(member.checked(Observation(observed.inputs, observed.logits, layers)).double())
        return torch.stack(found, 1)

    def ranks_of(self, observed: Observation) -> Tensor:
        """The members' ranks of a forward pass, float64 ``(N, K)``, with gradients."""
        if not self.clean.numel():
            raise self.error("has no clean scores; call fit_clean(clean_inputs) first")
        columns = self.scores_of(observed).unbind(1)
        return torch.stack([ranks_among(own, clean) for own, clean in zip(columns, self.clean, strict=True)], 1)

    def score_of(self, observed: Observation) -> Tensor:
        """The combined rank in [0, 1], ``(N,)``."""
        return combine_ranks(self.ranks_of(observed).T, method=self.method).to(observed.inputs.dtype)

    def packed(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """The clean scores, the threshold and all members; ModelError where a member wraps code of its user."""
        values, members = {"threshold": self.threshold, "clean": self.clean}, []
        for number, member in enumerate(self.members):
            about, tensors = member.packed()
            members.append(about)
            values.update({f"{number}.{name}": value for name, value in tensors.items()})
        settings = json.dumps({"method": self.method})
        return {"detector": type(self).__name__, "settings": settings, "members": json.dumps(members)}, values

    @classmethod
    def unpacked(
        cls,
        about: Mapping[str, str],
        values: Mapping[str, Tensor],
        classifier: nn.Module,
        *,
        kinds: Sequence[type[Detector]] = (),
    ) -> Self:
        """The detector of what :meth:`packed` returned; DataError: it is another, or a member is unknown."""
        cls.check_kind(about)
        if not {"threshold", "clean"} <= values.keys() or "members" not in about:
            raise DataError(f"holds {sorted(values)}, expected 'clean', 'threshold' and members")
        known: list[type[Detector]] = [*PUBLISHED, cls, *kinds]
        named = {kind.__name__: kind for kind in known}
        members = []
        for number, one in enumerate(json.loads(about["members"])):
            name, start = one["detector"], f"{number}."
            own = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
            try:
                if name not in named:
                    raise DataError("its class is unknown; give it in kinds")
                members.append(named[name].unpacked(one, own, classifier, kinds=kinds))
            except DataError as error:
                raise DataError(f"member {number}, {name}, cannot be read ({error})") from error
        detector = cls(classifier, members, **json.loads(about["settings"]))
        device = module_device(classifier)
        detector.threshold, detector.clean = values["threshold"].to(device), values["clean"].to(device)
        return detector
