"""The linf attack of Carlini and Wagner, for whole batches.

Source: Carlini and Wagner, "Towards Evaluating the Robustness of Neural Networks" (2017), section VI.C, with the margin
f_6 of section V.A and the change of variables of section V.B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_ext.attacks._common.detector_aware import no_classifier_gradients
from robust_ext.attacks._common.objectives import OBJECTIVES
from robust_ext.attacks._common.rows import Selectable, check_batch, gradient_of, hits, over_rows
from robust_ext.attacks.base import AttackTraits
from robust_ext.attacks.native import Batch, NativeAttack
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.settings import setting, settings_class

# Smallest limit that is tried, in widths of the bounds.
_SMALLEST = 1 / 256
# Where the bounds lie in tanh space. At 1 they would be infinitely far, and values there would never move.
_EDGE = 0.95
_BETAS = (0.9, 0.999)
# Far below the gradients that the smallest constants leave.
_ADAM_LEAST = 1e-12
# Fewest steps between two looks at a search.
_LEAST_LOOK = 10
# A search that lowers its loss by less than this share between two looks has ended.
_PROGRESS = 1e-4


@settings_class
class CarliniWagnerLinf(NativeAttack):
    """Looks for the misclassified point nearest in linf, under a limit on each value that is lowered step by step.

    For a limit tau and a constant c it minimises ``c max(z_y - max_{i != y} z_i + confidence, 0) + sum_i max(|d_i| -
    tau, 0)`` by Adam, where d is the perturbation in widths of the bounds. A search ends once the point is
    misclassified and no value is beyond tau. Then tau becomes ``decrease_factor`` times what the point needs, and the
    next search goes on from that point with the same c. A search that takes all its steps, or lowers its loss no more,
    has failed. Then c is multiplied by ``const_factor``, and the next search goes on from where this one ended. A row
    is finished when c exceeds ``largest_const``, or tau falls below 1/256 of the width. Of all points queried, it
    returns the misclassified one nearest to the input, and the input without one.

    The variable of Adam is the inverse tanh of the values, as in the paper. The bounds lie at tanh = .95 and -.95
    here instead of 1 and -1, and Adam stops there: values at a bound, as most are in MNIST, could not leave it
    otherwise.

    Each row has a limit, a constant and an optimiser of its own. All rows that are not finished go forward and back
    together, once a step; a result depends on no other row. Rows that are misclassified by ``confidence`` already
    come back as they are. The threat model's epsilon plays no part.

    Example:
        >>> CarliniWagnerLinf(steps=50).traits.minimum_norm
        True
    """

    name = "CarliniWagnerLinf"
    ranks = True
    traits = AttackTraits(
        batching="any", minimum_norm=True, norms=("linf",), leaves_ball=True, failure="input", seeds="none"
    )

    steps: int = setting(default=200, help="Most steps of Adam in one search.", minimum=1, trial=20, art="max_iter")
    learning_rate: float = setting(
        default=0.01, help="Learning rate of Adam, in tanh space.", above=0, trial=0.05, foolbox="stepsize"
    )
    initial_const: float = setting(default=1e-5, help="First c.", minimum=1e-10, trial=0.1)
    largest_const: float = setting(default=20.0, help="Largest c, at least ``initial_const``.", minimum=1e-10)
    const_factor: float = setting(default=2.0, help="Factor by which c grows.", minimum=1.001, trial=8)
    decrease_factor: float = setting(
        default=0.9, help="Factor by which tau shrinks.", above=0, maximum=0.999, trial=0.8
    )
    confidence: float = setting(default=0.0, help="By how much another class must win, in logits.", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.largest_const < self.initial_const:
            expected = f"at least initial_const, {self.initial_const:g}"
            raise InvalidArgumentError("largest_const", self.largest_const, expected)

    @property
    def most_steps(self) -> int:
        """More steps than a row ever takes: each search ends with a larger constant or a lower limit."""
        constants = math.log(self.largest_const / self.initial_const) / math.log(self.const_factor)
        limits = math.log(_SMALLEST) / math.log(self.decrease_factor)
        return self.steps * (math.ceil(constants) + math.ceil(limits) + 2) + 1

    def candidates(self, batch: Batch) -> Tensor:
        """See :meth:`NativeAttack.candidates`; an AttackRefusedError where the target gives no gradients."""
        inputs, labels = check_batch(batch.target, batch.inputs, batch.labels, batch.threat_model)
        best, nearest = inputs.clone(), inputs.new_full((len(inputs),), torch.inf)
        loss, gradient = inputs.new_zeros(len(inputs)), torch.zeros_like(inputs)
        box = _Box(batch.threat_model.bounds)
        rows = _Rows.start(inputs, labels, variables=box.variables(inputs), const=self.initial_const)
        for number in range(self.most_steps):
            if len(rows.place) == 0:
                break
            points, place = box.points(rows), rows.place
            short, slope, solved = self._shortfall(batch, points, rows.labels)
            offsets = (points - rows.inputs) / box.width
            distance = offsets.abs().flatten(1).amax(1)
            better = solved & (distance < nearest[place])
            best[place[better]], nearest[place[better]] = points[better], distance[better]
            self._adapt(rows, rows.loss(offsets, short), solved, distance)
            uphill = rows.gradient(offsets, slope * box.width)
            if batch.watch is not None:
                loss[place], gradient[place] = -rows.loss(offsets, short), -uphill / box.width
                shown = best.index_put((place,), points)
                batch.show(number, self.most_steps, shown, loss.clone(), gradient.clone())
            rows.descend(uphill * box.slope(rows), rate=self.learning_rate, furthest=box.furthest)
            left = (rows.const <= self.largest_const) & (rows.tau >= _SMALLEST)
            rows = rows if bool(left.all()) else rows.select(left)
        return best

    def _shortfall(self, batch: Batch, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shortfalls of points from the confidence ``(n,)``, their gradient, and a mask of solved rows."""
        loss = OBJECTIVES["margin"].of_kind(batch.goal)
        with torch.enable_grad():
            points = points.detach().requires_grad_(True)
            logits = batch.target.module(points)
            short = (self.confidence - loss(logits, labels)).clamp_min(0)
            slope = gradient_of(short, points, no_classifier_gradients(self.name))
        logits, short = logits.detach(), short.detach().to(points.dtype)
        # Where logits are not finite nothing is short, unless the attack aims.
        short = short.where(torch.isfinite(logits).all(1) | batch.targeted, 0)
        return short, slope, hits(logits, labels, batch.goal) & (short == 0)

    def _adapt(self, rows: _Rows, loss: Tensor, solved: Tensor, distance: Tensor) -> None:
        """Lower the limits of rows that have succeeded, raise the constants of those that have failed."""
        won = solved & (distance <= rows.tau)
        look = (rows.age > 0) & (rows.age % max(self.steps // 10, _LEAST_LOOK) == 0)
        still = look & ~(loss < (1 - _PROGRESS) * rows.level)
        lost = ~won & (still | (rows.age >= self.steps))
        rows.level = torch.where(look, loss, rows.level)
        rows.tau = torch.where(won, torch.minimum(rows.tau, distance) * self.decrease_factor, rows.tau)
        rows.const = torch.where(lost, rows.const * self.const_factor, rows.const)
        rows.restart(won | lost)


class _Box:
    """The bounds in tanh space."""

    def __init__(self, bounds: tuple[float, float]) -> None:
        self.bounds, self.width = bounds, bounds[1] - bounds[0]
        self.middle, self._reach = (bounds[0] + bounds[1]) / 2, self.width / 2 / _EDGE
        self.furthest = math.atanh(_EDGE)

    def variables(self, inputs: Tensor) -> Tensor:
        """Map inputs into tanh space."""
        return ((inputs - self.middle) / self._reach).clamp(-_EDGE, _EDGE).atanh()

    def points(self, rows: _Rows) -> Tensor:
        """Map variables into the bounds; unmoved values are exactly the inputs'."""
        points = (self.middle + self._reach * rows.variables.tanh()).clamp(*self.bounds)
        return torch.where(rows.variables == rows.origins, rows.inputs, points)

    def slope(self, rows: _Rows) -> Tensor:
        """Return the derivative of the offsets, in widths, by the variables."""
        return self._reach / self.width * (1 - rows.variables.tanh().square())


@dataclass
class _Rows(Selectable):
    """The n rows that are not finished, each with a search of its own: tensors ``(n,)`` or ``(n, ...)``."""

    place: Tensor  # In the batch.
    inputs: Tensor
    labels: Tensor
    origins: Tensor  # The inputs in tanh space,
    variables: Tensor  # and where the rows are now.
    mean: Tensor  # Adam's, of gradients,
    square: Tensor  # and of squared gradients.
    age: Tensor  # Steps of the present search.
    tau: Tensor  # Limit on each value in widths of the bounds.
    const: Tensor
    level: Tensor  # Loss at the last look.

    @classmethod
    def start(cls, inputs: Tensor, labels: Tensor, *, variables: Tensor, const: float) -> _Rows:
        """Return all rows, at their inputs."""
        place, zeros = torch.arange(len(inputs), device=inputs.device), torch.zeros_like(inputs)
        tau, age = inputs.new_ones(len(inputs)), torch.zeros_like(place)
        level = torch.full_like(tau, torch.inf)
        return cls(place, inputs, labels, variables, variables, zeros, zeros, age, tau, const * tau, level)

    def restart(self, chosen: Tensor) -> None:
        """Let the chosen rows begin a search where they are."""
        wide = over_rows(chosen, self.inputs)
        self.mean, self.square = self.mean.masked_fill(wide, 0), self.square.masked_fill(wide, 0)
        self.age, self.level = self.age.masked_fill(chosen, 0), self.level.masked_fill(chosen, torch.inf)

    def loss(self, offsets: Tensor, short: Tensor) -> Tensor:
        """``c short + sum_i max(|d_i| - tau, 0)``, ``(n,)``."""
        return self.const * short + (offsets.abs() - over_rows(self.tau, self.inputs)).clamp_min(0).flatten(1).sum(1)

    def gradient(self, offsets: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient of the loss by offsets ``(n, ...)``, from the gradient of ``short``."""
        return over_rows(self.const, self.inputs) * slope + offsets.sign() * (
            offsets.abs() > over_rows(self.tau, self.inputs)
        )

    def descend(self, gradient: Tensor, *, rate: float, furthest: float) -> None:
        """One step of Adam, from the gradient in tanh space."""
        self.age = self.age + 1
        self.mean = self.mean.lerp(gradient, 1 - _BETAS[0])
        self.square = self.square.lerp(gradient.square(), 1 - _BETAS[1])
        first, second = (over_rows(1 - beta**self.age, self.inputs) for beta in _BETAS)
        step = self.mean / first / ((self.square / second).sqrt() + _ADAM_LEAST)
        self.variables = (self.variables - rate * step).clamp(-furthest, furthest)
