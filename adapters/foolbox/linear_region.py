"""The linear-region attack as Foolbox attacks of smallest perturbation."""

from __future__ import annotations

from typing import Any

import eagerpy as ep
from torch import Tensor

from robust_ext.adapters.foolbox.black_box import NativeMinimizationAttack
from robust_ext.adapters.foolbox.library import foolbox
from robust_ext.adapters.foolbox.model import FoolboxModule
from robust_ext.adapters.foolbox.native import NativeFixedEpsilonAttack, torch_tensor
from robust_ext.adapters.native import Started, search_module
from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.core.settings import declared
from robust_ext.core.validation import check_integer, check_number

_base = foolbox.attacks.base
_distances: Any = foolbox.distances


class BaseLinearRegionAttack(NativeMinimizationAttack):
    """The linear-region attack, see :func:`robust_ext.attacks.linear_region.attack.LinearRegion`.

    Its subclasses have a norm. Models have to be piecewise affine; Foolbox's preprocessing and its change of bounds
    are. Epsilons do not change what is searched for, nor do they end the search.

    Args:
        starts: As all that follow, see :class:`robust_ext.attacks.linear_region.attack.LinearRegion`.
        pool: Images for ``start="nearest"``, a PyTorch tensor ``(P, ...)`` in the model's bounds.
        seed: Of all draws, the same in every call; None: what ``torch.manual_seed`` makes of them.

    Raises:
        InvalidArgumentError: A setting is not accepted.

    References:
        Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals overestimation of
        robustness using established attacks" (2019).
    """

    def __init__(
        self,
        *,
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
        pool: Tensor | None = None,
        seed: int | None = None,
    ) -> None:
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
        self.seed = seed
        if seed is not None:
            check_integer("seed", seed, minimum=0, maximum=2**63 - 1)
        self.native()

    def __repr__(self) -> str:
        """All settings; of a pool, how many images it has."""
        shown = vars(self) | ({} if self.pool is None else {"pool": f"{len(self.pool)} images"})
        return f"{type(self).__name__}({', '.join(f'{name}={value}' for name, value in shown.items())})"

    def native(self, *, stop: bool = True) -> LinearRegion:
        """The attack with these settings.

        Args:
            stop: Without effect: no sample is finished by an epsilon.
        """
        return LinearRegion(**{name: getattr(self, name) for name in declared(LinearRegion)})

    def run(
        self,
        model: Any,
        inputs: Any,
        criterion: Any,
        *,
        early_stop: float | None = None,
        starting_points: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Perturb a batch, see Foolbox's ``MinimizationAttack.run``.

        Args:
            model: A piecewise affine Foolbox model of PyTorch tensors in eval mode, wrapped or not.
            inputs: A batch ``(N, ...)`` in the model's bounds, a PyTorch tensor or EagerPy's.
            criterion: Labels ``(N,)``, or a criterion.
            early_stop: Without effect. Foolbox passes the smallest of the epsilons.
            starting_points: Points to begin at besides those searched for, ``(N, ...)``, or several for each input,
                ``(N, S, ...)``, in the model's bounds. No result is farther than the nearest of them that is
                adversarial; from one that is not, only the first steps may reach an adversarial point.
            **kwargs: There are none.

        Returns:
            Points in the bounds, of the type of the inputs; an input for which nothing was found comes back as it was.

        Raises:
            ValueError: The criterion is not supported, the tensors are not PyTorch's, or labels or starting points do
                not fit.
            ModelError: The model is not piecewise affine, or cannot be followed.
        """
        _base.raise_if_kwargs(kwargs)
        if early_stop is not None:
            check_number("epsilons", early_stop, minimum=0)
        points = None
        if starting_points is not None:
            points = torch_tensor("starting_points", ep.astensor(starting_points))
            points = points.unsqueeze(1) if points.ndim == inputs.ndim else points
        return _Once(self.native(), self.distance, self.seed).from_points(model, inputs, criterion, points)


class LinfLinearRegionAttack(BaseLinearRegionAttack):
    """Linf linear-region attack."""

    distance = _distances.linf


class L2LinearRegionAttack(BaseLinearRegionAttack):
    """L2 linear-region attack."""

    distance = _distances.l2


class L1LinearRegionAttack(BaseLinearRegionAttack):
    """L1 linear-region attack."""

    distance = _distances.l1


class _Once(NativeFixedEpsilonAttack):
    """The attack run as one with an epsilon, of which it makes no use."""

    distance: Any = None

    def __init__(self, attack: LinearRegion, distance: Any, seed: int | None) -> None:
        self.attack, self.distance, self.seed = attack, distance, seed

    def native(self) -> LinearRegion:
        return self.attack

    def from_points(self, model: Any, inputs: Any, criterion: Any, points: Tensor | None) -> Any:
        return self._perturb(model, inputs, criterion, epsilon=1.0, references=points)

    def _search(
        self, module: FoolboxModule, inputs: Tensor, labels: Tensor, *, references: Tensor | None, **ways: Any
    ) -> Tensor:
        return search_module(Started(self.attack, references), module, inputs, labels, **ways)
