"""Measurements of a defense before the attacks: its cost and the use of its gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.rows import l2_normalize
from robust_ext.core.errors import RobustExtError
from robust_ext.core.random import seeded_globals
from robust_ext.core.reached import Note, outermost_calls
from robust_ext.core.target import PassCounter, count_all_calls
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import PROBES, EvaluationInputs
from robust_ext.evaluations.adaptive.plan import View
from robust_ext.evaluations.adaptive.protocol import StepRun
from robust_ext.models.adaptive import AdaptiveDefense

# Passes of some rows that :func:`probe_outputs` and :func:`measure_cost` take at most, and the seconds they may take.
_PASSES, _SECONDS = 8, 30.0
# Inputs at which gradients are compared, about; and the squared distance of directions that is rounding in float32.
_PROBED, _ROUNDING = 16, 1e-6


def affordable(defense: AdaptiveDefense, given: EvaluationInputs, block: range) -> range:
    """The first rows of a block, in whole groups, that probes of the defense take half a minute for, by one pass."""
    unit = defense.group_size or PROBES
    few = range(block.start, min(block.start + unit, block.stop))
    begun = time.perf_counter()
    with torch.no_grad(), seeded_globals(0):
        defense(given.rows(few)[0])
    seconds = (time.perf_counter() - begun) / len(few)
    count = max(unit, int(_SECONDS / _PASSES / seconds) // unit * unit)
    return range(block.start, min(block.start + count, block.stop))


def measure_cost(defense: AdaptiveDefense, inputs: Tensor) -> dict[str, Any]:
    """Cost of a prediction, measured on a batch ``(n, ...)`` that the defense takes, the fastest of some rounds.

    ``seconds_ratio`` is that of the defense over the static model; ``networks`` has the passes for each input through
    every network that the defense holds, and ``forward`` and ``backward`` are their sums. A part that is called by
    itself counts as its share of the network's parameters; a backward pass where a gradient arrives at the input.
    """
    found = {name: {"forward": 0.0, "backward": 0.0} for name in defense.networks()}

    def noted(counts: dict[str, float]) -> Note:
        def add(way: str, amount: float) -> None:
            counts[way] += amount / len(inputs)

        def note(share: float, x: Tensor) -> Tensor:
            amount = share * len(x)
            add("forward", amount)
            if x.requires_grad:
                x = x.view_as(x)
                x.register_hook(lambda _: add("backward", amount))  # type: ignore[no-untyped-call]
            return x

        return note

    with torch.no_grad(), seeded_globals(0):
        with outermost_calls(defense.networks(), {name: noted(counts) for name, counts in found.items()}):
            defense(inputs)
        defended, static = (_fastest(one, inputs) for one in (defense, defense.classifier))
    passes = {name: {way: round(count, 6) for way, count in ways.items()} for name, ways in found.items()}
    return {
        "seconds_ratio": defended / static,
        **{way: sum(ways[way] for ways in passes.values()) for way in ("forward", "backward")},
        "networks": [{"name": name, **ways} for name, ways in passes.items()],
    }


def probe_outputs(defense: AdaptiveDefense, inputs: Tensor, labels: Tensor) -> list[str]:
    """Warnings that a few inputs ``(n, ...)`` suffice for."""
    with torch.no_grad(), seeded_globals(0):
        logits = defense(inputs)
    warnings = []
    inside = bool(((logits >= 0) & (logits <= 1)).all())
    if inside and bool(((logits.double().sum(1) - 1).abs() < 1e-4).all()):
        warnings.append("The defense returns probabilities where logits are expected: losses on them saturate.")
    gradient = gradient_at(defense, inputs, labels)
    if gradient is None:
        warnings.append("The defense has no gradients of its own: plain white-box attacks on it mean nothing.")
    else:
        size = gradient.flatten(1).abs().amax(1)
        share = float(((size == 0) | ~torch.isfinite(size)).double().mean())
        if share > 0:
            warnings.append(f"The defense's own gradients are zero on {share:.0%} of the samples looked at.")
    return warnings


def gradient_at(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor | None:
    """The gradient of the cross-entropy at inputs ``(n, ...)``, with the draws of a fixed seed; None without one."""
    points = inputs.clone().requires_grad_(True)
    with torch.enable_grad(), seeded_globals(0):
        logits = module(points)
        if not logits.requires_grad:
            return None
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return torch.autograd.grad(loss, points, allow_unused=True)[0]


def _fastest(module: nn.Module, inputs: Tensor) -> float:
    seconds: list[float] = []
    # One slow call is enough.
    while len(seconds) < 3 and not (seconds and seconds[0] > 1):
        begun = time.perf_counter()
        module(inputs)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


class _Gradient(NamedTuple):
    """A gradient at some inputs: rows of all networks for each, forward and back, and its directions ``(n, D)``."""

    passes: tuple[float, float]
    directions: Tensor


def _probe_gradient(
    module: nn.Module, networks: Mapping[str, nn.Module], inputs: Tensor, labels: Tensor
) -> _Gradient | None:
    """A gradient of the cross-entropy at inputs ``(n, ...)``; None without one."""
    counter = PassCounter()
    try:
        with count_all_calls(networks, counter):
            gradient = gradient_at(module, inputs, labels)
    except (RobustExtError, RuntimeError):
        return None
    if gradient is None:
        return None
    # Confident predictions have gradients that are tiny, and no less of a direction.
    directions = l2_normalize(gradient.nan_to_num().flatten(1).double())
    return _Gradient((counter.forward / len(inputs), counter.backward / len(inputs)), directions)


def with_costs(runs: Sequence[StepRun], *, queried: tuple[float, float]) -> list[StepRun]:
    """Runs with what a prediction costs, a gradient, and which of them have the gradients of BPDA's identity."""
    given, defense = runs[0].given, runs[0].defense
    size = defense.group_size or 1
    inputs, labels = given.rows(range(min(len(given.inputs) // size * size, max(_PROBED // size, 1) * size)))
    probes, found = dict[tuple[str, View], _Gradient | None](), list[StepRun]()
    for run in runs:
        step, measured = run.step, replace(run, queried=queried)
        if step is not None and step.exposure != "static" and step.attack.traits.gradients:
            key = step.exposure, step.view
            if key not in probes:
                probes[key] = _probe_gradient(step.module(defense, run.settings), run.networks(), inputs, labels)
            if (probe := probes[key]) is not None:
                measured = replace(measured, differentiated=probe.passes)
        found.append(measured)
    of_identity = probes.get(("identity", View()))
    same = {
        key
        for key, probe in probes.items()
        if probe and of_identity
        if float((probe.directions - of_identity.directions).square().sum(1).max()) < _ROUNDING
    }
    return [
        replace(run, twin=_twin(run, found)) if run.step and (run.step.exposure, run.step.view) in same else run
        for run in found
    ]


def _twin(run: StepRun, runs: Sequence[StepRun]) -> str:
    """Name of the step that runs the same attack through BPDA's identity; empty without one."""
    step = run.step
    if step is None or step.category != "white-box" or step.exposure == "identity":
        return ""
    others = [one.step for one in runs if one.step and one.step.exposure == "identity"]
    same = (other for other in others if (other.category, other.view) == (step.category, step.view))
    return next((other.name for other in same if describe(other.attack) == describe(step.attack)), "")
