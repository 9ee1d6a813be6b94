"""Test-time defenses inside other modules: found by what a forward pass does, and taken apart from their classifier."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from robust_ext.core.errors import collecting, warn
from robust_ext.core.guard import frozen
from robust_ext.core.random import seeded_globals
from robust_ext.engine.classifiers import as_classifier
from robust_ext.evaluations.causes.calls import Call, named
from robust_ext.evaluations.causes.tracing import PassTrace, traced
from robust_ext.models.adaptive import AdaptiveDefense
from robust_ext.models.black_box import black_box_in
from robust_ext.models.company import mixed
from robust_ext.models.function_purifier import FunctionPurifier, WholeDefense, called_alone
from robust_ext.models.layer_backward import forward_of
from robust_ext.models.rows import RowRNG, Solution, State

# Rows that are looked at, and the share of them that the classifier behind a defense has to predict alike.
_ROWS, _ALIKE = 4, 0.5


class Separated(NamedTuple):
    """A classifier, and the defense in front of it."""

    classifier: nn.Module
    defense: AdaptiveDefense


def separate(module: nn.Module, inputs: Tensor) -> Separated | None:
    """Return the classifier and the test-time defense that a module is made of; None for a plain classifier.

    A defense is an AdaptiveDefense anywhere inside; or what takes gradients of its own while it predicts, or loses
    those of the input and draws. Warns of what was found, and of a defense that cannot be told from its classifier.

    Args:
        module: From inputs ``(N, ...)`` to logits.
        inputs: Clean samples, float32 ``(N, ...)``; a few are used.
    """
    if black_box_in(module) is not None or isinstance(module, AdaptiveDefense) or not len(inputs):
        return None
    known = _outermost(module)
    rows = max([_ROWS, *(one.group_size or 1 for one in known)])
    few = inputs[torch.arange(rows) % len(inputs)]
    try:
        with collecting(), frozen(module, attributes=True):
            if known:
                found, words = _with_known(as_classifier(module, few), known, few), type(known[0]).__name__
            else:
                trace, random = _passes(module, few)
                place = trace.taking or (trace.cut.place.call if random and trace.cut is not None else None)
                if place is None:
                    return None
                given: dict[str, Any] = {"module": module, "x": few, "random": random}
                found = _with_module(_around(trace, place, few), **given) or _with_end(trace, place, **given)
                words = named(place)
                if found is None and trace.taking is None:
                    return None
    except Exception:
        # Whatever is wrong with it, the checks of classifiers say so.
        return None
    if found is None:
        warn(
            f"model: {words} takes gradients of its own while it runs, and no classifier was found behind it. It is "
            "attacked as one itself; for attacks past what it does give the network that it defends as the model, and "
            "this one as defense=..."
        )
    else:
        warn(
            f"model: {words} acts at test time, and is evaluated as a defense of the model without it. Give the "
            "classifier as the model and defense=... for another split"
        )
    return found


def _outermost(module: nn.Module) -> list[AdaptiveDefense]:
    """The AdaptiveDefenses inside that are in no other one."""
    if isinstance(module, AdaptiveDefense):
        return [module]
    found = [one for part in module.children() for one in _outermost(part)]
    return list(dict.fromkeys(found))


def _with_known(module: nn.Module, known: Sequence[AdaptiveDefense], x: Tensor) -> Separated | None:
    """Separate AdaptiveDefenses: one that gets the inputs themselves stays what it is, with what follows as its end."""
    random, groups = any(one.random for one in known), [one.group_size for one in known if one.group_size]
    static = _replaced(module, {id(one): one.classifier for one in known})
    seen: list[tuple[Tensor, Tensor]] = []
    with known[0].register_forward_hook(lambda _, args, out: seen.append((args[0].clone(), out))), torch.no_grad():
        logits = module(x)
        static(x)
    if len(known) == len(seen) == 1 and torch.equal(seen[0][0], x):
        (whole,) = known
        if torch.equal(seen[0][1], logits):
            return Separated(whole.classifier, whole)
        other = mixed(whole, _Followed)
        other.followed, other.classifier, other.output = (whole, module), static, "logits"
        return Separated(static, other)
    return Separated(static, WholeDefense(static, module, random=random, group_size=max(groups, default=None)))


class _Followed(AdaptiveDefense):
    """A defense whose logits a module that holds it makes something of."""

    # In a tuple, so that its parts are not counted twice.
    followed: tuple[AdaptiveDefense, nn.Module]

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Return the defense's own solution, by its own classifier."""
        return self.followed[0].with_steps(self.steps, checkpoint=self.checkpoint).solve(x, rng, record=record)

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return the module's output where the defense in it came to this point."""
        inside, module = self.followed
        found = inside.logits(point, state)
        with forward_of(inside, lambda *_: found):
            out: Tensor = module(point)
        return out


def _passes(module: nn.Module, x: Tensor) -> tuple[PassTrace, bool]:
    """Trace a forward pass at inputs with a gradient, and return whether the next one has other logits."""
    with traced(module, len(x)) as trace, seeded_globals(0), torch.enable_grad():
        first = module(x.clone().requires_grad_().clone())
    with seeded_globals(1), torch.enable_grad():
        second = module(x.clone())
    return trace, not torch.allclose(first, second, rtol=1e-3, atol=1e-5)


def _around(trace: PassTrace, place: Call, x: Tensor) -> nn.Module | None:
    """The outermost module from images to images that a call was made in."""
    images = [one for one in trace.calls if one.name and one.same_shape and _holds(one, place)]
    images = [one for one in images if one.points and one.points[0].shape == x.shape]
    return min(images, key=lambda one: len(one.name)).module if images else None


def _holds(call: Call, other: Call) -> bool:
    """Return whether a call is of another one's module, or of one that holds it."""
    return not call.name or f"{other.name}.".startswith(f"{call.name}.")


def _with_module(purifier: nn.Module | None, *, module: nn.Module, x: Tensor, random: bool) -> Separated | None:
    """Separate a purifier that is a module of its own: without it, the rest is the classifier."""
    if purifier is None:
        return None
    static = _replaced(module, {id(purifier): nn.Identity().eval()})
    if static is module:
        return None
    made = FunctionPurifier(static, purifier, random=random, group_size=getattr(purifier, "group_size", None))
    return _checked(static, made, module, x)


def _with_end(trace: PassTrace, place: Call, *, module: nn.Module, x: Tensor, random: bool) -> Separated | None:
    """Separate a module that purifies in its own forward: the classifier is the network that it calls at last."""
    ends = [one for one in trace.calls if not one.same_shape and one.points and one.points[0].shape == x.shape]
    ends = [one for one in ends if not _holds(one, place)]
    # Those of a module come before its own.
    for end in reversed(ends):
        static = end.module
        out = static(x.clone())
        if isinstance(out, Tensor) and out.dim() == 2 and out.shape[1] == module(x.clone()).shape[1]:
            return _checked(static, FunctionPurifier(static, _Entering(module, static), random=random), module, x)
    return None


class _Entering:
    """What a network gets when a module that holds it last calls it, as a function of the module's inputs."""

    def __init__(self, module: nn.Module, network: nn.Module) -> None:
        self.module, self.network = module, network

    def __call__(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        with self.network.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
            self.module(x)
        return seen[-1]


def _checked(static: nn.Module, made: FunctionPurifier, module: nn.Module, x: Tensor) -> Separated | None:
    """Return the defense, or the module as a whole where that is not what it computes."""
    with seeded_globals(0):
        alone = called_alone(module, x, [module])
    with seeded_globals(0):
        joined = static(called_alone(made.function, x, [module]))
    plain = static(x.clone())
    if float((plain.argmax(1) == alone.argmax(1)).double().mean()) < _ALIKE:
        return None
    if torch.allclose(alone, joined, rtol=1e-3, atol=1e-4):
        made.look_for_trajectory(x)
        return Separated(static, made)
    return Separated(static, WholeDefense(static, module, random=made.random, group_size=made.group_size))


def _replaced(module: nn.Module, parts: Mapping[int, nn.Module]) -> nn.Module:
    """Return a module with others in the place of some of its parts, by identity; it shares all else."""
    if id(module) in parts:
        return parts[id(module)]
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        return module
    changed = {name: made for name, part in module.named_children() if (made := _replaced(part, parts)) is not part}
    if not changed:
        return module
    other = copy.copy(module)
    other._modules = {**module._modules, **changed}
    return other
