"""Defenses that optimise at test time, as modules from inputs to logits.

Source of the scheme: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022),
section 2. Gradients of the input flow by plain autograd, through every step; :class:`robust_ext.models.bpda.BPDA` puts
others in their place, :class:`robust_ext.models.eot.EoT` averages over the draws of a random defense.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.modules import SettingsModule, module_class, positional
from robust_ext.core.random import stream
from robust_ext.core.reached import reached_modules
from robust_ext.core.settings import declared
from robust_ext.core.validation import check_bounds, check_choice, check_integer
from robust_ext.models.adaptive_solution import Solution, Trace, whole_groups
from robust_ext.models.row_rng import RowRNG, given_seeds, seeds_of

OUTPUTS = ("logits", "probabilities")

Self = TypeVar("Self", bound="AdaptiveDefense")


@module_class
class AdaptiveDefense(SettingsModule, ABC):
    """A static classifier behind an optimisation at test time.

    A subclass states in its class attributes what it is, and what it does in :meth:`solve` and, where that is more than
    the classifier, in :meth:`readout`. Purifiers implement a step alone, see
    :class:`~robust_ext.models.purifier.Purifier`. Settings of its own are declared, see
    :func:`~robust_ext.core.modules.module_class`.

    Draws of a random defense: a row's depend on (seed, draw, position in the batch), where the draw counts the batches
    since the seed was set. Without a seed they come from torch's global generator, fresh for each batch.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        steps: Inner steps, at least 0.
        group_size: For batch-level defenses, and only for them: how many rows are defended together. Rows
            ``0 .. group_size - 1`` of a batch are the first group, and so on.
        pad: Whether the last group is filled up with copies of the batch's first rows where rows are missing, instead
            of refusing the batch. The copies draw numbers of their own, and their logits are left out.
        checkpoint: Purifiers only: do each step once more in the backward pass, instead of holding its graph. See
            :class:`~robust_ext.models.purifier.Purifier`.
        seed: Of the draws; None for fresh ones.

    Attributes:
        name: What it is called in texts such as ``"hd(steps=5)"``; empty where it cannot be made by name.
        part_class: Class of its trained part, which ``part_class.load`` reads from a file; None where it has none.
        training_class: Class of the settings of its training, whose ``fit`` makes that part.
        random: Whether the logits of the same batch can differ.
        batch_level: Whether the logits of a row depend on the other rows of its group.
        needs_gradients: Whether :meth:`solve` needs gradients; they are switched on for it, regardless of the caller.
        output: What :meth:`readout` returns, ``"logits"`` or ``"probabilities"``.
        stretched: Settings for inputs in [0, 1] that the constructor multiplies by the width of ``bounds``.
        draw: Number of the next batch, for the draws.
        fixed: Whether every batch gets the draws of the same number.
    """

    __test__ = False

    name = ""
    part_class: ClassVar[Any] = None
    training_class: ClassVar[Any] = None
    random = False
    batch_level = False
    needs_gradients = False
    output = "logits"
    stretched: ClassVar[tuple[str, ...]] = ()

    classifier: nn.Module = positional("From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.", kw_only=False)
    steps: int = 0
    group_size: int | None = None
    pad: bool = False
    checkpoint: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        own = declared(type(self))
        for field in dataclasses.fields(AdaptiveDefense):
            # What a class of declared settings does not declare again has no effect there.
            if own and not type(self).__dataclass_fields__[field.name].metadata:
                value = getattr(self, field.name)
                if value != getattr(type(self), field.name, None):
                    expected = f"only settings of {type(self).__name__}: {', '.join(own)}"
                    raise InvalidArgumentError(field.name, value, expected)
        check_choice("output", self.output, OUTPUTS)
        check_integer("steps", self.steps, minimum=0)
        if self.batch_level and self.group_size is None:
            raise InvalidArgumentError("group_size", None, "the number of rows that this defense treats together")
        if self.group_size is not None and not self.batch_level:
            raise InvalidArgumentError("group_size", self.group_size, "None: this defense treats each row on its own")
        for name, minimum in (("group_size", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=minimum)
        if "bounds" in type(self).__dataclass_fields__:
            low, high = bounds = check_bounds(getattr(self, "bounds"))  # noqa: B009
            settings = {name: getattr(self, name) for name in self.stretched}
            wide = {name: value * (high - low) for name, value in settings.items() if value is not None}
            vars(self).update(wide, bounds=bounds)
        self.draw, self.fixed, self.training = 0, False, False

    @property
    def has_trajectory(self) -> bool:
        """True if its steps come by points between the input and the final one, at which gradients can be taken."""
        return self.steps > 1

    def networks(self) -> dict[str, nn.Module]:
        """All networks that it holds, by name: those whose passes are what it costs."""
        return reached_modules(self)

    @classmethod
    def part_arguments(cls, part: Any, classifier: nn.Module, inputs: Tensor) -> dict[str, Any]:
        """Return the constructor's arguments besides the classifier, from a trained part.

        Args:
            part: Of :attr:`part_class`.
            classifier: What it was trained for; raises where it was not.
            inputs: A few inputs, ``(n, ...)``, to try it on.
        """
        raise NotImplementedError(f"{cls.__name__} has no trained part")

    @abstractmethod
    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Optimise for the rows ``(N, ...)`` of one group, or of any batch where rows are on their own.

        Args:
            x: At least one row; not to be changed.
            rng: The rows' random numbers; the same for all rows and batches where the defense is not random.
            record: Whether the iterates are wanted.
        """

    def readout(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the value named by :attr:`output`, ``(N, K)``, at a solution; differentiable in ``point``.

        Each row stands for itself here: what rows share belongs into the state, repeated for each of them.
        """
        out: Tensor = self.classifier(point)
        return out

    def logits(self, point: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """The readout as logits ``(N, K)``: of probabilities, their logarithms.

        Their softmax is the probabilities again. A probability of 0 becomes the smallest that the type can hold, where
        the gradient is 0.
        """
        out = self.readout(point, state)
        if out.dim() != 2 or len(out) != len(point):
            raise ModelError(
                f"readout: got shape {tuple(out.shape)} for {len(point)} rows, expected ({len(point)}, classes)"
            )
        return out if self.output == "logits" else out.clamp_min(torch.finfo(out.dtype).tiny).log()

    def frozen(self, x: Tensor, *, inputs: Tensor, solution: Solution) -> Tensor:
        """Logits ``(N, K)`` of ``x`` with all that the defense had found for ``inputs`` held constant.

        Held are the change of the input and the state (Croce et al. 2022, section 3.3, for controls). A defense that
        holds something else overrides this.

        Args:
            x: ``(N, ...)``; gives the solution's logits where it is ``inputs``.
            inputs: ``(N, ...)``, in the type of the solution.
            solution: What :meth:`solution` returned for them.
        """
        final, inputs = solution.final.detach(), inputs.detach()
        moved = final - inputs
        # The rest is rounding: with it the inputs come out at their final points to the last bit.
        rest = final - (inputs + moved)
        return self.logits(x + moved + rest, solution.detached().state)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of inputs ``(N, ...)``.

        Inputs are taken in the type of the classifier's parameters.

        Raises:
            ModelError: The batch is not a whole number of groups.
        """
        return self._trace(x, self.next_seeds(len(x)), record=False).logits

    def trace(self, x: Tensor, *, seeds: Tensor | Sequence[int] | None = None) -> Trace:
        """Run the defense on ``x`` ``(N, ...)``, with the iterates.

        Args:
            x: Floating point.
            seeds: At least 0, one a row; those that :meth:`forward` would take when left out.

        Raises:
            InvalidArgumentError: Not one seed a row.
            ModelError: The batch is not a whole number of groups.
        """
        if seeds is None:
            return self._trace(x, self.next_seeds(len(x)), record=True)
        given = torch.as_tensor(seeds, dtype=torch.int64).cpu()
        if given.shape != x.shape[:1] or bool((given < 0).any()):
            raise InvalidArgumentError("seeds", seeds, f"{len(x)} integers of at least 0, one a row")
        return self._trace(x, given, record=True)

    def solution(self, x: Tensor, *, seeds: Tensor, record: bool = False) -> Solution:
        """Return the result of the inner steps for any batch ``(N, ...)`` of whole groups, without the readout.

        ``seeds``, int64 ``(N,)`` on the CPU, are as :meth:`next_seeds` gives them; ``record`` keeps the iterates.
        """
        x = self._as_input(x)
        if len(x) == 0:
            return Solution(x, (x,))
        if torch.is_grad_enabled():
            return self._grouped(x, seeds, record=record)
        # In inference mode nothing can be differentiated, not even inside.
        with torch.inference_mode(False), torch.set_grad_enabled(self.needs_gradients):
            inner = x.clone() if x.is_inference() else x.detach()
            return self._grouped(inner, seeds, record=record).detached()

    def next_seeds(self, rows: int) -> Tensor:
        """The seeds of the next batch, int64 ``(rows,)``; the batch counts as drawn."""
        if not self.random:
            return torch.zeros(rows, dtype=torch.int64)
        given = given_seeds(rows)
        if given is not None:
            return given
        if self.seed is None:
            return seeds_of(rows)
        draw = self.draw
        if not self.fixed:
            self.draw += 1
        return seeds_of(rows, stream(self.seed, "draw", draw))

    @contextmanager
    def seeded(self: Self, seed: int, *, draw: int = 0, fixed: bool = False) -> Iterator[Self]:
        """Draw from a seed inside, and as before afterwards; gives the defense itself.

        Args:
            seed: At least 0.
            draw: Number of the first batch.
            fixed: Whether every batch inside gets these same draws, which takes the randomness away.
        """
        before = self.seed, self.draw, self.fixed
        self.seed = check_integer("seed", seed, minimum=0)
        self.draw, self.fixed = check_integer("draw", draw, minimum=0), fixed
        try:
            yield self
        finally:
            self.seed, self.draw, self.fixed = before

    def _trace(self, x: Tensor, seeds: Tensor, *, record: bool) -> Trace:
        x = self._as_input(x)
        found = self.solution(x, seeds=seeds, record=record)
        logits = self.logits(found.final, found.state) if len(x) else self.classifier(x)
        return Trace(found.final, found.iterates, found.state, inputs=x, logits=logits, seeds=seeds)

    def _grouped(self, x: Tensor, seeds: Tensor, *, record: bool) -> Solution:
        if self.group_size is None:
            return self.solve(x, RowRNG(seeds), record=record)
        groups = whole_groups(x, seeds, size=self.group_size, pad=self.pad, random=self.random)
        return Solution.joined([self.solve(part, RowRNG(own), record=record) for part, own in groups], len(x))

    def _as_input(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            shown = f"dtype {x.dtype}, shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgumentError("x", shown, "a floating point tensor of shape (N, ...)")
        # On numpy 2, some of ART's attacks send float64.
        types = [p.dtype for p in self.classifier.parameters() if p.is_floating_point()]
        return x.to(types[0]) if types else x

    def with_steps(self: Self, steps: int, *, checkpoint: bool | None = None) -> Self:
        """This defense with another number of inner steps; it shares the networks, and counts its own draws.

        Args:
            steps: At least 0.
            checkpoint: Also change this setting.
        """
        other = copy.copy(self)
        # A shallow copy shares the registers too, and a module set on one would appear on the other.
        for register in ("_parameters", "_buffers", "_modules"):
            setattr(other, register, getattr(self, register).copy())
        other.steps = check_integer("steps", steps, minimum=0)
        other.checkpoint = self.checkpoint if checkpoint is None else checkpoint
        return other
