"""What steps cost, and which have the same gradients: one gradient through each exposure is taken beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from robust_ext.attacks._common.rows import l2_normalize
from robust_ext.core.errors import RobustExtError
from robust_ext.core.target import PassCounter, count_all_calls
from robust_ext.engine.identity import describe
from robust_ext.evaluations.adaptive.probes import gradient_at
from robust_ext.evaluations.adaptive.protocol import StepRun

# Inputs at which gradients are compared, about; and the squared distance of directions that is rounding in float32.
_PROBED, _ROUNDING = 16, 1e-6


@dataclass(frozen=True)
class GradientProbe:
    """One gradient at some inputs: rows ``forward`` and ``backward`` for each, and its ``directions`` ``(n, D)``."""

    forward: float
    backward: float
    directions: Tensor

    def equals(self, other: GradientProbe) -> bool:
        """Whether the directions of all inputs are the same, but for rounding."""
        return bool((self.directions - other.directions).square().sum(1).max() < _ROUNDING)


def probe_gradient(
    module: nn.Module, networks: Mapping[str, nn.Module], inputs: Tensor, labels: Tensor
) -> GradientProbe | None:
    """A gradient of the cross-entropy at inputs ``(n, ...)``, with the draws of a fixed seed; None without one."""
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
    return GradientProbe(counter.forward / len(inputs), counter.backward / len(inputs), directions)


def with_costs(runs: Sequence[StepRun], *, queried: tuple[float, float]) -> list[StepRun]:
    """Runs with what a prediction costs, a gradient, and which of them have the gradients of BPDA's identity."""
    given, defense = runs[0].given, runs[0].defense
    size = defense.group_size or 1
    inputs, labels = given.rows(range(min(len(given.inputs) // size * size, max(_PROBED // size, 1) * size)))
    probes, found = dict[tuple[str, bool], GradientProbe | None](), list[StepRun]()
    for run in runs:
        step, measured = run.step, replace(run, queried=queried)
        if step is not None and step.exposure != "static" and step.attack.traits.gradients:
            key = step.exposure, step.averaged and step.category == "white-box"
            if key not in probes:
                probes[key] = probe_gradient(step.module(defense, run.settings), run.networks(), inputs, labels)
            if (probe := probes[key]) is not None:
                measured = replace(measured, differentiated=(probe.forward, probe.backward))
        found.append(measured)
    of_identity = probes.get(("identity", True))
    for place, run in enumerate(found):
        probe = None if run.step is None else probes.get((run.step.exposure, run.step.averaged))
        twin = _through_identity(run, runs) if probe and of_identity and probe.equals(of_identity) else ""
        found[place] = replace(run, twin=twin)
    return found


def _through_identity(run: StepRun, runs: Sequence[StepRun]) -> str:
    """Name of the step that runs the same attack through BPDA's identity; empty where there is none."""
    step = run.step
    if step is None or step.category != "white-box" or step.exposure == "identity":
        return ""
    others = [one.step for one in runs if one.step and one.step.exposure == "identity"]
    same = (other for other in others if (other.category, other.averaged) == (step.category, step.averaged))
    return next((other.name for other in same if describe(other.attack) == describe(step.attack)), "")
