"""What the ART classes of this project's own attacks have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.model import adapt_model
from robust_ext.adapters.native import search_module
from robust_ext.attacks.native import NativeAttack, Step, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.target import frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_integer, check_labels, check_number

EvasionAttack: Any = art.attacks.EvasionAttack
SummaryWriter: Any = art.summary_writer.SummaryWriter
_estimators: Any = art.estimators
_classification: Any = art.estimators.classification

_NORMS = {"inf": "linf", np.inf: "linf", 2: "l2", 1: "l1"}


class NativeEvasionAttack(EvasionAttack):  # type: ignore[misc]
    """Base of this project's attacks as ART attacks: everything but the settings.

    A subclass adds its settings to ``attack_params``, keeps them as attributes of the same names, and makes the attack
    from them in :meth:`native`.

    Without a ``seed``, randomness follows ``np.random.seed``, as in ART. The network is attacked in eval mode, as ART
    predicts, and left in the mode it was in; its parameters' gradients are not touched. Results do not depend on the
    batch size.

    Args:
        estimator: A ``PyTorchClassifier`` with ``clip_values`` whose preprocessing, if it has any, runs in PyTorch.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each step.
        verbose: Whether to show a progress bar.

    Raises:
        EstimatorError: The estimator is no classifier.
        ValueError: It is no ``PyTorchClassifier``, or a setting is not accepted.
    """

    attack_params: ClassVar[list[str]] = [
        *EvasionAttack.attack_params,
        "norm",
        "eps",
        "targeted",
        "batch_size",
        "seed",
        "summary_writer",
        "verbose",
    ]
    _estimator_requirements: Any = (
        _estimators.BaseEstimator,
        _estimators.LossGradientsMixin,
        _classification.ClassifierMixin,
    )

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str,
        eps: float,
        targeted: bool,
        batch_size: int,
        seed: int | None,
        summary_writer: Any,
        verbose: bool,
    ) -> None:
        super().__init__(estimator=estimator, summary_writer=summary_writer)
        if not isinstance(estimator, _classification.PyTorchClassifier):
            expected = "a PyTorchClassifier: this attack runs on PyTorch models only"
            raise InvalidArgumentError("estimator", f"a {type(estimator).__name__}", expected)
        self.norm = norm
        self.eps = eps
        self.targeted = targeted
        self.batch_size = batch_size
        self.seed = seed
        self.verbose = verbose

    @abstractmethod
    def native(self) -> NativeAttack:
        """The attack with the settings of this object.

        Raises:
            InvalidArgumentError: A setting is not accepted.
        """

    @property
    def summary_writer(self) -> Any:
        """Where steps are reported, or None."""
        return self._summary_writer

    @summary_writer.setter
    def summary_writer(self, value: Any) -> None:
        self._summary_writer_arg = value
        self._summary_writer = value if isinstance(value, SummaryWriter) else None
        if isinstance(value, (bool, str)) and value:
            self._summary_writer = art.summary_writer.SummaryWriterDefault(value)

    def generate(self, x: Any, y: Any = None, **kwargs: Any) -> Any:
        """Perturb a batch.

        Args:
            x: Inputs ``(N, ...)`` within the estimator's ``clip_values``; not changed.
            y: Labels, one-hot ``(N, K)`` or indices ``(N,)``: the true classes, or the classes to aim at. None:
                the estimator's predictions.
            **kwargs: There are none.

        Returns:
            float32 array ``(N, ...)`` in the ball and within the clip values.

        Raises:
            ValueError: Inputs, labels or a keyword are not accepted, a targeted attack has no labels, or the estimator
                has no clip values.
            ModelError: The estimator has preprocessing outside PyTorch, or postprocessing.
        """
        if kwargs:
            raise InvalidArgumentError("generate", f"the keyword {next(iter(kwargs))!r}", "x and y alone")
        return self._generate(x, y)

    def _generate(self, x: Any, y: Any, *, references: Tensor | None = None) -> Any:
        """See :meth:`generate`."""
        with frozen(self.estimator.model):
            self.estimator.model.eval()
            adapted = adapt_model(self.estimator)
            if adapted.bounds is None:
                expected = "a pair (lowest, highest): candidates have to stay in bounds"
                raise InvalidArgumentError("estimator", "clip_values=None", expected)
            inputs = check_inputs("x", torch.from_numpy(np.array(x, dtype=np.float32)), bounds=adapted.bounds)
            labels = self._labels(inputs, y)
            groups = self._groups(references, inputs, adapted.bounds)
            out = inputs
            if self.eps != 0:
                out = self._search(adapted.module, inputs, labels, groups, adapted.bounds)
        if self.summary_writer is not None:
            self.summary_writer.reset()
        return out.numpy()

    def _search(
        self,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        references: Tensor | None,
        bounds: tuple[float, float],
    ) -> Tensor:
        threat_model = ThreatModel(norm=_NORMS[self.norm], epsilon=self.eps, bounds=bounds)
        seed = int(np.random.randint(2**31)) if self.seed is None else self.seed
        # Shared by all batches: each sample draws from it in turn, so the batch size decides nothing.
        generator = torch.Generator().manual_seed(seed)
        attack, device = self.native(), self.estimator.device
        columns = [torch.split(column, self.batch_size) for column in (inputs, labels)]
        groups = [None] * len(columns[0]) if references is None else torch.split(references, self.batch_size)
        parts = list(zip(*columns, groups, strict=True))
        shown = tqdm(parts, desc=f"{type(self).__name__} - Batches", leave=False, disable=not self.verbose)
        found = [
            self._search_batch(
                attack,
                module,
                batch.to(device),
                aims,
                references=group,
                threat_model=threat_model,
                generator=generator,
                targeted=self.targeted,
                watch=self._watch(number, aims),
            ).cpu()
            for number, (batch, aims, group) in enumerate(shown)
        ]
        return torch.cat(found)

    def _search_batch(
        self,
        attack: NativeAttack,
        module: nn.Module,
        inputs: Tensor,
        labels: Tensor,
        *,
        references: Tensor | None,
        **ways: Any,
    ) -> Tensor:
        """Candidates ``(N, ...)`` of one batch."""
        return search_module(attack, module, inputs, labels, **ways)

    def _groups(self, references: Tensor | None, inputs: Tensor, bounds: tuple[float, float]) -> Tensor | None:
        """Points to imitate, ``(N, R, ...)``, or None."""
        return None

    def _classes(self) -> int:
        """How many classes labels may be of."""
        return int(self.estimator.nb_classes)

    def _watch(self, batch_id: int, labels: Tensor) -> Watch | None:
        """What tells the summary writer of each step."""
        if self.summary_writer is None:
            return None
        one_hot = nn.functional.one_hot(labels, self.estimator.nb_classes).numpy().astype(np.float32)

        def update(step: Step) -> None:
            self.summary_writer.update(
                batch_id=batch_id,
                global_step=step.number,
                grad=None if step.gradient is None else _array(step.gradient),
                patch=None,
                estimator=self.estimator,
                x=_array(step.points),
                y=one_hot,
                targeted=self.targeted,
            )

        return update

    def _labels(self, inputs: Tensor, y: Any) -> Tensor:
        """Labels as int64 ``(N,)``."""
        classes = self._classes()
        if y is None:
            if self.targeted:
                raise InvalidArgumentError("y", None, "labels to aim at, because the attack is targeted")
            y = self.estimator.predict(inputs.numpy(), batch_size=self.batch_size)[:, :classes]
        y = np.asarray(y)
        hot = y.ndim == 2 and y.shape[1] in (classes, self.estimator.nb_classes)
        if not hot and y.shape not in (y.shape[:1], (*y.shape[:1], 1)):
            expected = f"one-hot labels ({len(inputs)}, {classes}) or indices ({len(inputs)},)"
            raise InvalidArgumentError("y", f"shape {y.shape}", expected)
        indices = y.argmax(1) if hot else y.reshape(-1)
        return check_labels("y", torch.from_numpy(indices.astype(np.int64)), samples=len(inputs), classes=classes)

    def _check_params(self) -> None:
        """Raise ``ValueError`` where a setting is not accepted."""
        super()._check_params()
        if self.norm not in _NORMS:
            raise InvalidArgumentError("norm", self.norm, 'np.inf, "inf", 2 or 1')
        self.eps = check_number("eps", self.eps, minimum=0)
        for name in ("targeted", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(name, getattr(self, name), "True or False")
        self.batch_size = check_integer("batch_size", self.batch_size, minimum=1)
        if self.seed is not None:
            self.seed = check_integer("seed", self.seed, minimum=0, maximum=2**63 - 1)
        norms = self.native().traits.norms
        if _NORMS[self.norm] not in norms:
            raise InvalidArgumentError("norm", self.norm, f"one for {' or '.join(norms)}, as the other settings are")


def _array(tensor: Tensor) -> Any:
    """A copy in numpy, which the attack's next step does not change."""
    return tensor.detach().cpu().numpy().copy()
