"""BPDA: the value of a defense, with a gradient that helps where its own does not.

Source: Athalye, Carlini and Wagner, "Obfuscated Gradients Give a False Sense of Security" (2018), section 4.1; the
forms for defenses that optimise at test time follow Croce et al., "Evaluating the Adversarial Robustness of Adaptive
Test-time Defenses" (2022), sections 3.3 to 3.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.foreign import teaching
from robust_ext.core.validation import check_integer
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.layer_backward import (
    LAYER_BACKWARDS,
    approximated,
    find_layers,
    other_backward,
    straight_through,
    substitute_vjp,
)
from robust_ext.models.rows import Solution, row_seeds
from robust_ext.models.vjp import VJP, attach, row_gradient, wants_gradient, with_vjp
from robust_ext.models.wrapping import module_of

BACKWARDS = (*LAYER_BACKWARDS, "frozen", "trajectory", "unrolled")
"""Choices of ``backward``; the last three are those of defenses alone."""
_OF_DEFENSES = BACKWARDS[len(LAYER_BACKWARDS) :]


@teaching
class BPDA(nn.Module):
    """The output of ``forward``, always, with a chosen gradient of the input.

    It stands around a network of which a ``layer`` has no gradient of use (``BPDA(network, layer="quantise")``), around
    a preprocessor in front of one (``nn.Sequential(BPDA(quantise), network)``), or around a whole
    :class:`robust_ext.models.adaptive.AdaptiveDefense`. It is a view for attacks: parameters inside get no gradients.

    The choices of ``backward``:

    - ``"identity"``: a layer's or preprocessor's gradient is passed on as it comes; a defense's is that of its readout
      at the final point, its state held.
    - ``"straight_through"``: operations inside that round or detach have the identity's gradient, all others their own,
      see :class:`robust_ext.models.layer_backward.StraightThrough`; the layer's shape may change.
    - A module or function from inputs to outputs of the same shape as ``forward``'s: its gradient at the input. For a
      defense, for example, its static classifier, or another ``BPDA`` of it.
    - ``"frozen"``, defenses only: what the defense found for the input is held, and the input moves, see
      :meth:`AdaptiveDefense.frozen`. It differs from the identity where a defense overrides that.
    - ``"trajectory"``, defenses only: the mean of the gradients of the readout at the points that the steps made. Each
      gets the gradient of the loss by the final logits; :func:`trajectory_gradient` takes each point's own.
    - ``"unrolled"``, defenses only: the gradient through all steps.

    Identity, frozen and unrolled hold the graph of the pass at the final point until the output's is freed; a
    substitute and the trajectory do their passes when the gradient is taken, and hold inputs only.

    Args:
        forward: A function or module from ``(N, ...)`` to ``(N, ...)``, a test-time defense, or a model of any type
            that :func:`robust_ext.as_module` takes, as a Foolbox model or an ART classifier.
        layer: Name of the module in ``forward`` that ``backward`` is for, as in ``named_modules()``, or the end of it;
            or several with commas between them; all of ``forward`` when left out. ModelError where a forward pass does
            not call it.
        backward: See above.
        steps: Defenses only: take the gradient from the defense with this many inner steps and the same draws, at the
            cost of its forward pass; wrap ``defense.with_steps(k)`` to be rid of the value's own, and judge what was
            found on the defense itself.
        checkpoint: With ``"unrolled"`` and a :class:`robust_ext.models.adaptive.Purifier`: hold no graph of a step but
            do it again in the backward pass.

    Example:
        >>> rounded = BPDA(torch.round)
        >>> x = torch.tensor([[0.4, 0.6]], requires_grad=True)
        >>> rounded(x).detach(), torch.autograd.grad(rounded(x).sum(), x)[0]
        (tensor([[0., 1.]]), tensor([[1., 1.]]))
    """

    def __init__(
        self,
        forward: nn.Module | Callable[[Tensor], Tensor],
        *,
        layer: str | None = None,
        backward: str | nn.Module | Callable[[Tensor], Tensor] = "identity",
        steps: int | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        expected = "a function or module from (N, ...) to a batch"
        forward = module_of(forward)
        if not callable(forward):
            raise InvalidArgumentError("forward", type(forward).__name__, expected)
        if not callable(backward) and backward not in BACKWARDS:
            raise InvalidArgumentError("backward", backward, f"one of {', '.join(map(repr, BACKWARDS))}, or {expected}")
        self.wrapped = forward
        self.layer = layer
        self.backward = backward
        self.steps = None if steps is None else check_integer("steps", steps, minimum=0)
        self.checkpoint = checkpoint
        self.training = False
        if layer is not None:
            if not isinstance(forward, nn.Module):
                raise InvalidArgumentError("layer", layer, f"a module with layers, not {type(forward).__name__}")
            find_layers(forward, layer)
        elif isinstance(forward, AdaptiveDefense):
            return
        if backward in _OF_DEFENSES or steps is not None or checkpoint:
            given = f"{backward!r}" if backward in _OF_DEFENSES else "steps or checkpoint"
            raise InvalidArgumentError(
                "forward",
                f"{type(forward).__name__} with {given}",
                "an AdaptiveDefense for that; for layers and other modules choose backward='identity', "
                "'straight_through' or a substitute",
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``forward``'s output for inputs ``(N, ...)``; ModelError where the identity does not fit its shape."""
        wrapped = self.wrapped
        # Hooks of a defense see none of the passes through its parts.
        run = wrapped.forward if isinstance(wrapped, AdaptiveDefense) else wrapped
        if not wants_gradient(x):
            with torch.no_grad():
                out: Tensor = run(x)
            return out
        if self.layer is not None and isinstance(wrapped, nn.Module):
            return attach(partial(self._of_layers, wrapped, self.layer), x)
        if self.backward == "straight_through":
            return attach(partial(with_vjp, partial(straight_through, run)), x)
        if isinstance(wrapped, AdaptiveDefense):
            return attach(partial(self._of_defense, wrapped), x)
        return attach(lambda inner: approximated(run(inner), inner, self.backward, name=type(wrapped).__name__), x)

    @property
    def through(self) -> nn.Module | None:
        """The module whose parts are run as they are but for a layer or operations; None around anything else."""
        if not isinstance(self.wrapped, nn.Module) or isinstance(self.wrapped, AdaptiveDefense):
            return None
        return self.wrapped if self.layer or self.backward == "straight_through" else None

    def around(self, other: nn.Module) -> BPDA:
        """The same gradients of another module that runs what this one stands around."""
        return BPDA(other, layer=self.layer, backward=self.backward)

    def _of_layers(self, network: nn.Module, names: str, x: Tensor) -> tuple[Tensor, VJP]:
        # They are looked up at each call, so that copies of this module have their own.
        layers = find_layers(network, names)
        other = partial(other_backward, network, layers, self.backward)
        with other() as check_called:
            value, pull = with_vjp(network, x)
        check_called()

        def vjp(cotangent: Tensor) -> Sequence[Tensor | None]:
            # Recomputation in the backward pass needs it there too.
            with other():
                return pull(cotangent)

        return value, vjp

    def _of_defense(self, defense: AdaptiveDefense, x: Tensor) -> tuple[Tensor, VJP]:
        seeds, crafted = defense.next_seeds(len(x)), defense
        if self.steps is not None or self.checkpoint:
            steps = defense.steps if self.steps is None else self.steps
            crafted = defense.with_steps(steps, checkpoint=self.checkpoint or None)
        equal = crafted.steps == defense.steps
        if len(x) == 0 or (equal and self.backward == "unrolled"):
            return with_vjp(lambda leaf: crafted.trace(leaf, seeds=seeds).logits, x)
        found = defense.solution(x, seeds=seeds, record=equal and self.backward == "trajectory")
        if equal and self.backward == "identity":
            return with_vjp(lambda point: defense.logits(point, found.state), found.final)
        # A copy, as the caller may change its input in place.
        held, known = x.clone(), found if equal else None

        def vjp(cotangent: Tensor) -> list[Tensor | None]:
            if not callable(self.backward):
                return _vjp_of_defense(crafted, self.backward, held, seeds, known, cotangent)
            # Defenses in the substitute draw as the defense did.
            with row_seeds(seeds):
                return substitute_vjp(self.backward, held, cotangent)

        return defense.logits(found.final, found.state), vjp


def trajectory_gradient(
    defense: AdaptiveDefense,
    x: Tensor,
    labels: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    seeds: Tensor | None = None,
) -> Tensor:
    """The mean of the gradients of a loss at the points a defense goes through (Croce et al. 2022, section 3.5).

    ``loss`` maps logits ``(N, K)`` and ``labels``, int64 ``(N,)``, to losses ``(N,)``. ``seeds``, int64 ``(N,)``, are
    those of a random defense, its next ones when left out. The mean ``(N, ...)`` is to be applied at ``x``.
    """
    with torch.no_grad():
        trace = defense.trace(x, seeds=seeds)
    if len(x) == 0:
        return torch.zeros_like(x)
    points = _points(trace)
    total = torch.zeros_like(points[0])
    for point in points:
        total += row_gradient(lambda leaf: loss(defense.logits(leaf, trace.state), labels), point)
    return (total / len(points)).to(x)


def _points(solution: Solution) -> tuple[Tensor, ...]:
    """The points that steps made; the final one where there were none."""
    return solution.iterates[1:] or (solution.final,)


def _vjp_of_defense(
    defense: AdaptiveDefense, backward: str, x: Tensor, seeds: Tensor, found: Solution | None, cotangent: Tensor
) -> list[Tensor | None]:
    """VJP a gradient of the logits back to the input ``x``, one readout's graph at a time."""
    if backward == "unrolled":
        return list(with_vjp(lambda leaf: defense.trace(leaf, seeds=seeds).logits, x)[1](cotangent))
    if found is None:
        found = defense.solution(x, seeds=seeds, record=backward == "trajectory")
    if backward == "frozen":
        inputs = x.to(found.final)
        return list(with_vjp(lambda leaf: defense.frozen(leaf, inputs=inputs, solution=found), inputs)[1](cotangent))
    points = _points(found) if backward == "trajectory" else (found.final,)
    total = torch.zeros_like(found.final)
    for point in points:
        (gradient,) = with_vjp(lambda leaf: defense.logits(leaf, found.state), point)[1](cotangent)
        total += 0 if gradient is None else gradient
    return [total / len(points)]
