"""Test-time defenses in the binarization test: their features, and a binarized readout inside of them.

The test replaces a network's linear readout (Zimmermann et al. 2022, algorithm 1). Here the readout is that at the end
of a defense, so its features are those of the point that the defense came to. The defense goes on adapting by the
classifier it was made for: did it adapt by the new readout, the features that this is fitted to would change with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import ModelError, SplitError
from robust_ext.core.target import Counted, PassCounter
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.models.company import Accompanied, mixed
from robust_ext.models.features import LayerInput, Split, layer_names, split_linear
from robust_ext.models.rows import Solution, State, given_seeds, seeds_of
from robust_ext.models.vjp import VJP, attach, wants_gradient, with_vjp

_HOOKS = tuple(key for key in vars(nn.Module()) if key.startswith(("_forward_", "_backward_")))


class Bare(nn.Module):
    """A module without its hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the module's forward pass for ``(N, ...)``."""
        out: Tensor = self.module.forward(x)
        return out


class StandIn(nn.Module):
    """A stand-in for a queried module, with that module's hooks; parameters get no gradients.

    Args:
        original: Whose hooks it has, those that are registered later too.
        inside: What runs in its place, which calls the original by :class:`Bare` alone, any number of times.
        counter: Of rows, for which a queried row is one of the original's; None to leave counting to what is inside.
        temperature: What logits are divided by.
    """

    def __init__(
        self, original: nn.Module, inside: nn.Module, *, counter: PassCounter | None = None, temperature: float = 1.0
    ) -> None:
        super().__init__()
        # The registers themselves, so that hooks come and go for both.
        vars(self).update({key: vars(original)[key] for key in _HOOKS})
        self.original = original
        self.inside = inside
        self.counter = counter
        self.temperature = temperature
        self.training = False
        self._counted = any(isinstance(part, Counted) and part.counter is counter for part in original.modules())

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of ``(N, ...)``."""

        def run(x: Tensor) -> Tensor:
            out: Tensor = self.inside(x)
            return out if self.temperature == 1 else out / self.temperature

        def differentiable(x: Tensor) -> tuple[Tensor, VJP]:
            rows = len(x)
            with self._once("forward", rows):
                value, pull = with_vjp(run, x)

            def vjp(cotangent: Tensor) -> Sequence[Tensor | None]:
                with self._once("backward", rows):
                    return pull(cotangent)

            return value, vjp

        if wants_gradient(x):
            return attach(differentiable, x)
        with torch.no_grad(), self._once("forward", len(x)):
            return run(x)

    @contextmanager
    def _once(self, way: str, rows: int) -> Iterator[None]:
        """Count the work inside the block as these rows."""
        counter = self.counter
        if counter is None:
            yield
            return
        before, watch = counter.snapshot(), counter.watch
        counter.watch = None
        try:
            yield
        finally:
            spent, counter.watch = counter.since(before), watch
            counter.forward, counter.backward = before.forward, before.backward
            if self._counted or getattr(spent, way):
                getattr(counter, f"count_{way}")(rows)


_PROBLEM = "binarized problem"


class DefendedFeatures(nn.Module):
    """The input of the last linear layer at the end of a test-time defense, or its log-probabilities, as a module.

    ``held`` takes a random defense with its first draw for every row and call, so that the features are a function of
    the input: the test then covers all but the averaging over draws. Otherwise every call draws afresh, from torch's
    global generator. ``layer`` is the name of a linear layer that the readout calls once, as in
    ``defense.named_modules()``; without one the features are the logits, of a defense that returns probabilities their
    logarithms. ``defense`` is a copy that shares the networks. A batch-level defense raises ModelError unless it has a
    company, see :func:`~robust_ext.models.company.in_company`: elsewhere a point has no features.
    """

    def __init__(self, defense: AdaptiveDefense, layer: str, *, held: bool = True) -> None:
        super().__init__()
        if defense.batch_level and not isinstance(defense, Accompanied):
            raise ModelError(
                f"{type(defense).__name__}: treats rows together, so that a point alone has no features; give it a "
                "company, as robust_ext.models.company.in_company does"
            )
        self.defense: AdaptiveDefense = mixed(defense, _Held if held else _Fresh)
        self.layer = layer
        self.training = False

    def forward(self, x: Tensor) -> Tensor:
        """Features ``(N, F)`` of inputs ``(N, ...)``."""
        found = self.defense.solution(x, seeds=self.defense.next_seeds(len(x)))
        return _features(self.defense, self.layer, self.defense.output, found.final, found.state)

    def extra_repr(self) -> str:
        """The defense's settings, which distinguish one run from another."""
        shown = [
            f", {name}={value!r}"
            for name, value in sorted(vars(self.defense).items())
            if isinstance(value, (bool, int, float, str, tuple)) and name not in ("draw", "training") and name[0] != "_"
        ]
        draws = "" if isinstance(self.defense, _Held) else ", drawn afresh"
        return f"layer={self.layer!r}{''.join(shown)}{draws}"


def split_defense(defense: AdaptiveDefense, inputs: Tensor, *, layer: str | None = None, held: bool = True) -> Split:
    """Split a defense into features and the linear readout at its end, verified on ``inputs``, float32 ``(n, ...)``.

    The features of a defense that returns probabilities are their logarithms, as no linear layer makes them. ``held``
    is as of :class:`DefendedFeatures`. Raises ModelError for batch-level defenses without a company, SplitError where
    the logits are not those of one linear layer that is called once; without ``layer`` it is found.
    """
    name = type(defense).__name__
    if defense.output != "logits":
        if layer is not None:
            raise SplitError(f"{name}: got layer {layer!r} of a defense that returns probabilities, expected none")
        features = DefendedFeatures(defense, "", held=held)
        with torch.no_grad():
            shape = tuple(features(inputs).shape[1:])
        return Split(features, nn.Identity().eval(), shape=shape, kind="logits")
    first = DefendedFeatures(defense, "").defense
    with torch.no_grad():
        found = first.solution(inputs, seeds=first.next_seeds(len(inputs)))
    try:
        parts = split_linear(_Readout(first, found.state), found.final, layer=None if layer is None else _inside(layer))
    except SplitError as error:
        raise SplitError(f"{name}, at its end: {error}") from error
    layer = ",".join(name.removeprefix("defense.") for name in layer_names(parts.layer))
    return Split(DefendedFeatures(defense, layer, held=held), parts.readout, layer, parts.shape)


def together(features: nn.Module) -> int:
    """Return how many rows the defense behind features treats together; 1 where each row is on its own."""
    inside = [part.defense for part in features.modules() if isinstance(part, DefendedFeatures)]
    return max((part.group_size or 1 for part in inside if part.batch_level), default=1)


def binarized_defense(module: nn.Module) -> AdaptiveDefense | None:
    """The test-time defense that a module is, or is made of; None without one.

    Of the classifier that the binarization test hands to attacks where a defense is tested, it is a defense whose
    readout is that classifier's, with logits ``(N, 2)``: so BPDA and all else that takes a defense take it too.
    """
    module = module.module if isinstance(module, Counted) else module
    if not isinstance(module, BinarizedClassifier):
        return module if isinstance(module, AdaptiveDefense) else None
    features = module.features.module if isinstance(module.features, Counted) else module.features
    if not isinstance(features, DefendedFeatures):
        return None
    inside: Any = mixed(features.defense, _Binarized)
    # Its readout returns logits, even if the defense returns probabilities.
    inside.binarized, inside.layer = (module,), features.layer
    inside.own_output, inside.output = features.defense.output, "logits"
    made: AdaptiveDefense = inside
    return made


class _Readout(nn.Module):
    """The end of a defense: from final points to logits, its state held."""

    def __init__(self, defense: AdaptiveDefense, state: State) -> None:
        super().__init__()
        self.defense = defense
        self.state = state
        self.training = False

    def forward(self, point: Tensor) -> Tensor:
        # The defense's own: that of a binarized one would compute features in turn.
        own: Any = super(_Binarized, self.defense) if isinstance(self.defense, _Binarized) else self.defense
        out: Tensor = own.readout(point, self.state)
        return out


class _Held(AdaptiveDefense):
    """Every row of every batch draws the same."""

    def next_seeds(self, rows: int) -> Tensor:
        return torch.full((rows,), self.seed or 0, dtype=torch.int64)


class _Fresh(AdaptiveDefense):
    """Every batch draws afresh, by the global generators alone."""

    def next_seeds(self, rows: int) -> Tensor:
        given = given_seeds(rows)
        return seeds_of(rows) if given is None else given


class _Binarized(AdaptiveDefense):
    """A defense whose readout is a binarized classifier's; it finds the rows' problems by their inputs."""

    # In a tuple, which keeps it from being registered as a part of the defense: it holds the defense itself.
    binarized: tuple[BinarizedClassifier]
    layer: str
    own_output: str

    def _grouped(self, x: Tensor, seeds: Tensor, *, record: bool) -> Solution:
        found = super()._grouped(x, seeds, record=record)
        index = self.binarized[0].problems(x.to(self.binarized[0].references))
        if index is None:
            index = torch.arange(len(x), device=x.device)
        return Solution(found.final, found.iterates, {**found.state, _PROBLEM: index})

    def readout(self, point: Tensor, state: State) -> Tensor:
        own = {name: value for name, value in state.items() if name != _PROBLEM}
        return self.binarized[0].read(_features(self, self.layer, self.own_output, point, own), state[_PROBLEM])


def _features(defense: AdaptiveDefense, layer: str, output: str, point: Tensor, state: State) -> Tensor:
    """Return the features at the point ``(N, ...)`` that a defense came to, see :class:`DefendedFeatures`."""
    end = _Readout(defense, state)
    out: Tensor = LayerInput(end, _inside(layer))(point) if layer else end(point)
    return out if layer or output == "logits" else out.clamp_min(torch.finfo(out.dtype).tiny).log()


def _inside(layer: str) -> str:
    """Names of layers of a defense as those of a module that holds it."""
    return ",".join(f"defense.{name}" for name in layer_names(layer))
