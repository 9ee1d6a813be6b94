"""The affine map of a network in the linear regions of a batch of points, without its matrix."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from robust_ext.attacks.linear_region.network.affine import ChannelScale, Convolution
from robust_ext.attacks.linear_region.network.gates import Gate
from robust_ext.attacks.linear_region.network.tape import Step


class Regions:
    """The linear regions of ``N`` points, and the network's affine map in each.

    In the region of row ``i`` the network is affine, and the region is the set of inputs at which all constraints
    ``C_i z + d_i`` are at least 0 (Croce, Rauber and Hein 2019, section 2). A row of constraints that is 0 everywhere,
    or constant, is possible: a value that cannot change in this region constrains nothing.

    The weights are the network's own, not copies. Nothing here counts passes; ``forward`` and ``adjoint`` cost a
    forward and a backward pass each.

    Attributes:
        rows: Number of points, ``N``.
        shape: Shape of one input.
        dtype: Of the input.
        constraints: Number of constraints of a row, ``M``, of which many may be inactive.
        logits: The network's logits at the points, ``(N, K)``.
        layers: Name and columns of each gate, in the order of the constraints.
    """

    def __init__(
        self, steps: Sequence[Step], *, shape: tuple[int, ...], dtype: torch.dtype, output: int, logits: Tensor
    ) -> None:
        self.shape, self.dtype, self.logits, self.rows = shape, dtype, logits, logits.shape[0]
        self._output = output
        self._steps = tuple(steps)
        self._gates = [step.operation for step in steps if isinstance(step.operation, Gate)]
        ends = [0, *accumulate(gate.constraints for gate in self._gates)]
        self.layers = tuple((gate.name, slice(*pair)) for gate, pair in zip(self._gates, pairwise(ends), strict=True))
        self.constraints = ends[-1]
        self._last = _last_uses(self._steps, output)

    def forward(self, z: Tensor, *, spare: int = 0) -> tuple[Tensor, Tensor]:
        """Return constraints ``C z + d``, ``(N, M + spare)``, and logits ``A z + b``, ``(N, K)``, at points.

        The points ``z`` ``(N, *shape)`` are of the network's dtype, inside the region, where all constraints are at
        least 0, or not. The ``spare`` columns are left for the caller to fill.
        """
        constraints = z.new_empty(self.rows, self.constraints + spare)
        columns = iter(self.layers)
        return constraints, self._run(z, lambda gate, x: gate.apply(constraints[:, next(columns)[1]], x))

    @torch.no_grad()
    def _run(self, z: Tensor, at_gate: Callable[..., Tensor]) -> Tensor:
        """Return the logits, with the result of each gate from a function of the gate and its input."""
        values: dict[int, Tensor] = {0: z}
        for step, last in zip(self._steps, self._last, strict=True):
            operation = step.operation
            if isinstance(operation, Gate):
                values[step.output] = at_gate(operation, values[step.inputs[0]])
            else:
                values[step.output] = operation.apply(*(values[i] for i in step.inputs))
            for unused in last:
                del values[unused]
        return values[self._output]

    @torch.no_grad()
    def adjoint(self, multipliers: Tensor, logits: Tensor | None = None) -> Tensor:
        """Return ``C' y + A' v`` of each row, ``(N, *shape)``, from ``y (N, M)`` and ``v (N, K)``."""
        gradients: dict[int, Tensor] = {}
        if logits is not None:
            gradients[self._output] = logits
        columns = iter(reversed(self.layers))
        for step in reversed(self._steps):
            operation = step.operation
            gradient = gradients.pop(step.output, None)
            returned: tuple[Tensor, ...]
            if isinstance(operation, Gate):
                returned = (operation.adjoint(gradient, multipliers[:, next(columns)[1]]),)
            elif gradient is None:
                continue
            else:
                returned = operation.adjoint(gradient)
            for number, value in zip(step.inputs, returned, strict=True):
                gradients[number] = gradients[number] + value if number in gradients else value
        return gradients[0] if 0 in gradients else multipliers.new_zeros(self.rows, *self.shape)

    def at(self, points: Tensor) -> Regions:
        """Return the regions of other points ``(n, *shape)``, by one pass of the recorded steps."""
        gates: list[Gate] = []

        def choose(gate: Gate, x: Tensor) -> Tensor:
            chosen, out = gate.at(x)
            gates.append(chosen)
            return out

        logits = self._run(points, choose)
        return self._with(gates, logits)

    def select(self, rows: Tensor) -> Regions:
        """Return the regions of some rows, int64 indices ``(n,)``, which may repeat."""
        return self._with([gate.select(rows) for gate in self._gates], self.logits[rows])

    def _with(self, gates: Sequence[Gate], logits: Tensor) -> Regions:
        following = iter(gates)
        steps = [
            Step(next(following), step.inputs, step.output) if isinstance(step.operation, Gate) else step
            for step in self._steps
        ]
        return Regions(steps, shape=self.shape, dtype=self.dtype, output=self._output, logits=logits)

    def agrees(self, other: Regions) -> Tensor:
        """Return which constraints mean the same in other regions of the same network, bool ``(N, M)``.

        Two neighbours differ by the sign of the constraint between them, and by the gates behind it.
        """
        parts = [mine.agrees(theirs) for mine, theirs in zip(self._gates, other._gates, strict=True)]
        return torch.cat(parts, 1) if parts else self.logits.new_ones(self.rows, 0, dtype=torch.bool)

    def pattern(self) -> list[bytes]:
        """Return a digest of each row's choices: 16 bytes that are the same for points of the same region.

        Only patterns of one network can be compared.
        """
        digests = [hashlib.blake2b(digest_size=16) for _ in range(self.rows)]
        for gate in self._gates:
            choices = gate.choices().cpu().numpy()
            packed = np.packbits(choices, axis=1) if choices.dtype == np.bool_ else choices
            for digest, row in zip(digests, packed, strict=True):
                digest.update(row.tobytes())
        return [digest.digest() for digest in digests]


def merge_scales(steps: Sequence[Step], output: int) -> list[Step]:
    """Return the steps with each scaling of channels merged into the convolution before it."""
    uses = Counter(number for step in steps for number in step.inputs) + Counter([output])
    out: list[Step] = []
    places: dict[int, int] = {}
    for step in steps:
        place = places.get(step.inputs[0])
        before = out[place].operation if place is not None and uses[step.inputs[0]] == 1 else None
        if place is not None and isinstance(before, Convolution) and isinstance(step.operation, ChannelScale):
            out[place] = Step(before.scaled(step.operation), out[place].inputs, step.output)
        else:
            place = len(out)
            out.append(step)
        places[step.output] = place
    return out


def _last_uses(steps: Sequence[Step], output: int) -> list[tuple[int, ...]]:
    """Return for each step the values that no later step uses."""
    seen = {output}
    lasts: list[tuple[int, ...]] = []
    for step in reversed(steps):
        unused = {*step.inputs, step.output} - seen
        seen |= unused
        lasts.append(tuple(unused))
    return lasts[::-1]
