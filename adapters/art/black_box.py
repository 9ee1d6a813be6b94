"""This project's attacks without gradients as ART attacks."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from robust_ext.adapters.art.library import art
from robust_ext.adapters.art.native import NativeEvasionAttack
from robust_ext.attacks import rays, square
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_number

_REQUIREMENTS: Any = (art.estimators.BaseEstimator, art.estimators.classification.ClassifierMixin)


class RayS(NativeEvasionAttack):
    """The nearest boundary from predicted labels alone, see :class:`robust_ext.attacks.rays.RayS`.

    Points lie where they are found, which may be beyond ``eps``, as with ART's other attacks of smallest perturbation.

    Args:
        estimator: A ``PyTorchClassifier`` with ``clip_values``.
        norm: ``np.inf`` or ``"inf"``.
        eps: Above 0, in units of the inputs: how near a point has to be for its sample to be finished.
        queries: Most points asked about for each sample, the input among them.
        tolerance: How near to the boundary a binary search ends, above 0.
        stop: Whether samples are finished at ``eps``. If not, they are searched on until their queries are used up, and
            ``eps`` plays no part.
        keep_rows: Whether every query sends the whole batch, finished samples as they are.
        targeted: False; it cannot aim.
        batch_size: How many samples are attacked together.
        seed: Without effect, as nothing is drawn.
        summary_writer: As in all of ART; updated after each query.
        verbose: Whether to show a progress bar.
    """

    attack_params: ClassVar[list[str]] = [
        *NativeEvasionAttack.attack_params,
        "queries",
        "tolerance",
        "stop",
        "keep_rows",
    ]
    _estimator_requirements: Any = _REQUIREMENTS

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        queries: int = 10_000,
        tolerance: float = 1e-3,
        stop: bool = True,
        keep_rows: bool = True,
        targeted: bool = False,
        batch_size: int = 32,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            estimator,
            norm=norm,
            eps=eps,
            targeted=targeted,
            batch_size=batch_size,
            seed=seed,
            summary_writer=summary_writer,
            verbose=verbose,
        )
        self.queries = queries
        self.tolerance = tolerance
        self.stop = stop
        self.keep_rows = keep_rows
        self._check_params()

    def native(self) -> rays.RayS:
        """RayS with these settings."""
        return rays.RayS(queries=self.queries, tolerance=self.tolerance, stop=self.stop, keep_rows=self.keep_rows)

    def _check_params(self) -> None:
        super()._check_params()
        check_number("eps", self.eps, minimum=0, open_minimum=True)
        if self.targeted:
            raise InvalidArgumentError("targeted", True, "False: RayS cannot aim at a class")


class Square(NativeEvasionAttack):
    """Random search by square windows, see :class:`robust_ext.attacks.square.Square`.

    Unlike ART's ``SquareAttack`` it has l1, and each sample is treated on its own.

    Args:
        estimator: A ``PyTorchClassifier`` with ``clip_values``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: At least 0, in units of the inputs.
        queries: Points asked about in each run; ART's own attack says ``max_iter``.
        p: Share of the pixels in the first windows, in (0, 1]; ART's own attack says ``p_init``.
        restarts: Runs from first points of their own; ART's own attack says ``nb_restarts``.
        loss: ``"margin"`` or ``"ce"``.
        stop_early: Whether samples that are solved stay as they are.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each query.
        verbose: Whether to show a progress bar.
    """

    attack_params: ClassVar[list[str]] = [
        *NativeEvasionAttack.attack_params,
        "queries",
        "p",
        "restarts",
        "loss",
        "stop_early",
    ]
    _estimator_requirements: Any = _REQUIREMENTS

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = np.inf,
        eps: float = 0.3,
        queries: int = 5000,
        p: float = 0.8,
        restarts: int = 1,
        loss: str = "margin",
        stop_early: bool = True,
        targeted: bool = False,
        batch_size: int = 32,
        seed: int | None = None,
        summary_writer: Any = False,
        verbose: bool = True,
    ) -> None:
        super().__init__(
            estimator,
            norm=norm,
            eps=eps,
            targeted=targeted,
            batch_size=batch_size,
            seed=seed,
            summary_writer=summary_writer,
            verbose=verbose,
        )
        self.queries = queries
        self.p = p
        self.restarts = restarts
        self.loss = loss
        self.stop_early = stop_early
        self._check_params()

    def native(self) -> square.Square:
        """Square with these settings."""
        return square.Square(
            queries=self.queries, p=self.p, restarts=self.restarts, loss=self.loss, stop_early=self.stop_early
        )
