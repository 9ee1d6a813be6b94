"""The linear-region attack as an ART attack."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from robust_ext.adapters.art.native import NativeEvasionAttack
from robust_ext.adapters.native import Started, search_module
from robust_ext.attacks.linear_region import attack as core
from robust_ext.attacks.native import NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import declared
from robust_ext.core.validation import check_inputs, check_number

_SETTINGS = list(declared(core.LinearRegion))


class LinearRegion(NativeEvasionAttack):
    """The nearest adversarial point, see :func:`robust_ext.attacks.linear_region.attack.LinearRegion`.

    The network and the estimator's preprocessing have to be piecewise affine. Points lie where they are found, which
    may be beyond ``eps``, as with ART's other attacks of smallest perturbation. The batch size changes results only by
    way of rounding, which may choose between points that are nearly as near, and so lead the search elsewhere.

    Args:
        estimator: A ``PyTorchClassifier`` with ``clip_values``.
        norm: ``np.inf``, ``"inf"``, 2 or 1.
        eps: Above 0; it plays no part in the search.
        starts: As all that follow up to ``batch``, see
            :class:`robust_ext.attacks.linear_region.attack.LinearRegion`. ``seconds`` are those of one batch
            of ``batch_size``.
        pool: Images for ``start="nearest"``, an array ``(P, ...)`` within the clip values.
        targeted: Whether to aim at the labels.
        batch_size: How many samples are attacked together.
        seed: Of all draws, the same in every call; None: what ``np.random.seed`` makes of them.
        summary_writer: As in all of ART; updated after each hop and round.
        verbose: Whether to show a progress bar.
    """

    attack_params: ClassVar[list[str]] = [*NativeEvasionAttack.attack_params, *_SETTINGS]

    def __init__(
        self,
        estimator: Any,
        *,
        norm: float | str = 2,
        eps: float = 0.3,
        starts: int = 12,
        start: str = "noise",
        fab_steps: int = 30,
        survivors: int = 4,
        basin_hops: int = 24,
        hop_length: float | None = None,
        hop_steps: int | None = None,
        regions: int = 40,
        halving: int = 3,
        q: float = 0.8,
        gamma: float = 6.0,
        classes: str = "runner-up",
        improvement: tuple[float, float] = (0.02, 0.001),
        iterations: int = 100,
        passes: int | None = None,
        seconds: float | None = None,
        batch: int = 128,
        pool: Any = None,
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
        self.starts = starts
        self.start = start
        self.fab_steps = fab_steps
        self.survivors = survivors
        self.basin_hops = basin_hops
        self.hop_length = hop_length
        self.hop_steps = hop_steps
        self.regions = regions
        self.halving = halving
        self.q = q
        self.gamma = gamma
        self.classes = classes
        self.improvement = improvement
        self.iterations = iterations
        self.passes = passes
        self.seconds = seconds
        self.batch = batch
        self.pool = pool
        self._check_params()

    def native(self) -> core.LinearRegion:
        """The attack with these settings."""
        return core.LinearRegion(**{name: getattr(self, name) for name in _SETTINGS})

    def generate(self, x: Any, y: Any = None, x_adv_init: Any = None, **kwargs: Any) -> Any:
        """Perturb a batch.

        Args:
            x: Inputs ``(N, ...)`` within the estimator's ``clip_values``; not changed.
            y: Labels, one-hot ``(N, K)`` or indices ``(N,)``: the true classes, or the classes to aim at. None:
                the estimator's predictions.
            x_adv_init: Points to begin at besides those searched for, ``(N, ...)`` as in ART's other attacks, or
                several for each input, ``(N, S, ...)``, within the clip values. No result is farther than the nearest
                of them that is adversarial; from one that is not, only the first steps may reach an adversarial point.
            **kwargs: There are none.

        Returns:
            float32 array ``(N, ...)`` within the clip values; an input for which nothing was found comes back as it
            was.

        Raises:
            ValueError: Inputs, labels, starting points or a keyword are not accepted, a targeted attack has no labels,
                or the estimator has no clip values.
            ModelError: The network is not piecewise affine or cannot be followed, or the estimator has preprocessing
                outside PyTorch, or postprocessing.
        """
        if kwargs:
            raise InvalidArgumentError("generate", f"the keyword {next(iter(kwargs))!r}", "x, y and x_adv_init alone")
        return self._generate(x, y, references=None if x_adv_init is None else _tensor(x_adv_init))

    def _groups(self, references: Tensor | None, inputs: Tensor, bounds: tuple[float, float]) -> Tensor | None:
        if references is None:
            return None
        points = references.unsqueeze(1) if references.ndim == inputs.ndim else references
        if points.shape[:1] != inputs.shape[:1] or points.shape[2:] != inputs.shape[1:]:
            shape = ", ".join(map(str, inputs.shape[1:]))
            expected = f"shape ({len(inputs)}, {shape}) or ({len(inputs)}, S, {shape})"
            raise InvalidArgumentError("x_adv_init", f"shape {tuple(references.shape)}", expected)
        check_inputs("x_adv_init", points.flatten(0, 1), bounds=bounds)
        return points

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
        return search_module(Started(attack, references), module, inputs, labels, **ways)

    def _check_params(self) -> None:
        super()._check_params()
        check_number("eps", self.eps, minimum=0, open_minimum=True)


def _tensor(values: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))
