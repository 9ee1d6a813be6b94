"""Purifiers and whole defenses as their authors write them: functions and modules that know nothing of this project."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import ModelError
from robust_ext.core.foreign import foreign_code
from robust_ext.core.random import seeded_globals
from robust_ext.core.reached import outermost_calls, reached_modules
from robust_ext.models.adaptive import AdaptiveDefense, Purifier
from robust_ext.models.rows import RowRNG, Solution, State
from robust_ext.models.vjp import attach, detach, wants_gradient

SEEN = 10
"""Points that are kept, evenly spaced among all: each takes a gradient of its own."""
# Inputs of a network that are farther from the images than this, relative to their length, are something else.
_FAR = 0.5
# Gradients that differ by more than this, relative to their length, went through more than a sum.
_CHANGED = 0.5


@contextmanager
def seen_points(networks: Mapping[str, nn.Module], x: Tensor) -> Iterator[list[Tensor]]:
    """Watch what networks get while a purifier runs on ``x`` ``(N, ...)`` inside: its points, filled in afterwards.

    These are the points where gradients were taken, if any; else all inputs, evenly thinned out.
    """
    x, points = x.detach(), list[Tensor]()
    followed, others = list[Tensor](), list[Tensor]()
    differentiated = False

    def note(_share: float, value: Tensor) -> Tensor:
        nonlocal differentiated
        if value.shape == x.shape and value.dtype == x.dtype:
            point, kept = value.detach(), followed if value.requires_grad else others
            differentiated |= value.requires_grad
            near = bool((point - x).norm() <= _FAR * x.norm())
            # Not one that was computed from a point, such as another view of it.
            if near and not (kept and torch.equal(kept[-1], point)) and _is_point(value):
                kept.append(point.clone())
        return value

    with outermost_calls(networks, dict.fromkeys(networks, note)):
        yield points
    points += evenly(followed if differentiated else others, SEEN, at_most=True)


def evenly(points: Sequence[Tensor], count: int, *, at_most: bool = False) -> list[Tensor]:
    """``count`` of some points, evenly spaced, the first and the last among them; some repeated where there are fewer.

    With ``at_most`` none is repeated.
    """
    if len(points) <= count and at_most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (count - 1))] for place in range(count)]


def _is_point(value: Tensor) -> bool:
    """Return whether gradients pass from a value to a leaf of its shape unchanged: the leaf only moves it."""
    if not value.requires_grad or value.is_leaf:
        return True
    waiting, seen, leaves = [value.grad_fn], set[Any](), list[Tensor]()
    while waiting:
        node: Any = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            leaf = getattr(node, "variable", None)
            leaves += [leaf] if leaf is not None and leaf.shape == value.shape else []
            waiting += [inner for inner, _ in node.next_functions]
    if not leaves:
        return False
    tried = torch.linspace(-1, 1, value.numel(), dtype=value.dtype, device=value.device).view(value.shape)
    found = torch.autograd.grad(value, leaves, tried, retain_graph=True, allow_unused=True)
    return any(one is not None and bool((one - tried).norm() <= _CHANGED * tried.norm()) for one in found)


F = TypeVar("F")
STATED = ("group_size", "random", "trajectory")
"""Attributes by which a function or object states what it is, see :func:`purifier`."""


def purifier(
    *,
    group_size: int | None = None,
    random: bool = False,
    trajectory: Callable[[Tensor], Iterable[Tensor]] | None = None,
) -> Callable[[F], F]:
    """State what a function, or class, that purifies is; plain attributes of these names on it do the same.

    Args:
        group_size: How many rows it purifies together, where a row's result depends on the others.
        random: Whether it draws, from the global generators of torch, numpy or ``random``.
        trajectory: From inputs ``(N, ...)`` to the points ``(N, ...)`` that its steps come to, in order, the last of
            which is what it returns. Without one the inputs of the networks that it holds are watched.

    Example:
        >>> @purifier(group_size=16)
        ... def centre(x):
        ...     return x - 0.1 * (x.mean(0, keepdim=True) - x.mean())
        >>> centre.group_size
        16
    """

    def state(target: F) -> F:
        made: Any = target
        made.group_size, made.random = group_size, random
        if trajectory is not None:
            made.trajectory = trajectory
        return target

    return state


class FunctionPurifier(Purifier):
    """Any function from inputs to purified inputs ``(N, ...)``, in front of a classifier; one step.

    ``random`` and ``group_size`` are as for :func:`purifier`. Its trajectory is what its attribute ``trajectory``
    returns for the inputs or, where that is a list, the points that the last call left there; without one, the inputs
    that the networks it holds were seen to get.
    """

    def __init__(
        self,
        classifier: nn.Module,
        function: Callable[[Tensor], Tensor],
        *,
        random: bool = False,
        group_size: int | None = None,
    ) -> None:
        self.batch_level = group_size is not None
        super().__init__(classifier, steps=1, group_size=group_size)
        self.function = function
        self.random = random
        self.needs_gradients = True
        self._traced = False

    @property
    def has_trajectory(self) -> bool:
        """True if points between the input and the final one were found, see :meth:`look_for_trajectory`."""
        return self._traced

    def networks(self) -> dict[str, nn.Module]:
        """The classifier, and what the function holds."""
        return {"classifier": self.classifier, **reached_modules(self.function)}

    def look_for_trajectory(self, x: Tensor) -> None:
        """Try it on inputs ``(N, ...)``, of which N is a whole number of groups."""
        found = self.solution(x, seeds=torch.zeros(len(x), dtype=torch.int64), record=True)
        self._traced = not all(torch.equal(point, x) or torch.equal(point, found.final) for point in found.iterates)

    def step(self, point: Tensor, *, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        """Apply the function to the point, with generators seeded by the samples' seeds."""
        with self._drawing(rng):
            return self._checked(called_alone(self.function, point, self.networks().values()), point)

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Call the function once; its declared trajectory takes another call."""
        if not record:
            return super().solve(x, rng, record=False)
        with seen_points(self.networks(), x) as seen:
            found = super().solve(x, rng, record=True)
        stated: Any = getattr(self.function, "trajectory", None)
        if callable(stated):
            given = stated
            with self._drawing(rng):
                stated = called_alone(lambda leaf: list(given(leaf)), x.detach(), self.networks().values())
        # The last one is the final point, which is there already.
        points = [self._checked(point, x).detach() for point in stated][:-1] if stated else seen
        points = [point for point in points if not torch.equal(point, x)]
        if self.batch_level:
            # As many for each group.
            points = evenly(points or [found.final.detach()], SEEN)
        return replace(found, iterates=(x, *points, found.final))

    def _drawing(self, rng: RowRNG) -> AbstractContextManager[object]:
        return seeded_globals(rng.seeds[0]) if self.random else nullcontext()

    def _checked(self, out: object, x: Tensor) -> Tensor:
        if not isinstance(out, Tensor) or out.shape != x.shape:
            shown = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise ModelError(f"the purifier returned {shown} for inputs of shape {tuple(x.shape)}")
        return out


class WholeDefense(AdaptiveDefense):
    """A module that is classifier and defense in one, from inputs to logits: what happens inside cannot be seen.

    ``classifier`` is the static one it is held against; the rest is as for :class:`FunctionPurifier`.
    """

    def __init__(
        self, classifier: nn.Module, module: nn.Module, *, random: bool = False, group_size: int | None = None
    ) -> None:
        self.batch_level = group_size is not None
        super().__init__(classifier, group_size=group_size)
        self.module = module
        self.random = random
        self.needs_gradients = True

    def networks(self) -> dict[str, nn.Module]:
        """The classifier, and what the module holds."""
        return {"classifier": self.classifier, **reached_modules(self.module)}

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Nothing: the module does it all."""
        return Solution(x, (x,), {"seed": torch.tensor(rng.seeds)})

    def readout(self, point: Tensor, state: State) -> Tensor:
        """The module's logits, of one group after another, each drawing by the seed of its first sample."""
        size, networks = self.group_size or max(len(point), 1), self.networks().values()
        parts = []
        for rows, seeds in zip(torch.split(point, size), torch.split(state["seed"], size), strict=True):
            with seeded_globals(int(seeds[0])) if self.random else nullcontext():
                parts.append(called_alone(self.module, rows, networks))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def called_alone(function: Callable[[Tensor], Any], x: Tensor, networks: Iterable[nn.Module]) -> Any:
    """Return a function's output for a copy of ``x`` ``(N, ...)``, with gradients enabled regardless of the caller.

    So it can take gradients of its own, by ``backward`` too: neither ``x`` nor the graph it comes from nor the
    parameters of the networks get any of them. The gradient of a tensor that it returns flows back to ``x`` where the
    caller wants it, once; all other results have no graph. ModelError: the function raised.
    """
    wanted = wants_gradient(x)
    name = getattr(function, "__name__", type(function).__name__)
    hint = "it is called with gradients enabled, on a copy of the inputs that it may change"
    kept = [(parameter, parameter.grad) for network in networks for parameter in network.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        with torch.inference_mode(False), torch.enable_grad():
            leaf = detach(x).requires_grad_(wanted)
            own = leaf.clone()
            if wanted:
                own.retain_grad()  # It may be looked for after a backward pass
            with foreign_code("defense", f"{name}, on inputs of shape {tuple(x.shape)},", hint=hint, kind=ModelError):
                out = function(own)
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient
    if not isinstance(out, Tensor):
        return out
    if not (wanted and out.requires_grad):
        return detach(out)

    def vjp(cotangent: Tensor) -> Sequence[Tensor | None]:
        with torch.inference_mode(False):
            return torch.autograd.grad(out, leaf, cotangent, retain_graph=True, allow_unused=True)

    return attach(lambda _: (out, vjp), x)
