"""Defenses that optimise at test time, as modules from inputs to logits.

Source of the scheme: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022),
section 2. Gradients of the input flow by plain autograd, through every step; :class:`robust_ext.models.bpda.BPDA` puts
others in their place, :class:`robust_ext.models.eot.EoT` averages over the draws of a random defense.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.modules import SettingsModule, module_class, positional
from robust_ext.core.random import derive_seed, stream
from robust_ext.core.reached import reached_modules
from robust_ext.core.settings import declared
from robust_ext.core.validation import check_bounds, check_choice, check_integer
from robust_ext.models.rows import Drawing, RowRNG, Solution, State, Trace, given_seeds, seeds_of
from robust_ext.models.vjp import attach_checkpoint, wants_gradient

Self = TypeVar("Self", bound="AdaptiveDefense")


@module_class
class AdaptiveDefense(Drawing, SettingsModule, ABC):
    """A static classifier behind an optimisation at test time.

    A subclass has class attributes, :meth:`solve`, :meth:`readout` where that is more than the classifier, and declared
    settings, see :func:`~robust_ext.core.modules.module_class`. A :class:`Purifier` has a step alone.

    Draws of a random defense: a row's depend on (seed, draw, position in the batch), where the draw counts the batches
    since the seed was set. Without a seed they come from torch's global generator, fresh for each batch.

    Args:
        classifier: From inputs ``(N, ...)`` to logits ``(N, K)``, in eval mode.
        steps: Inner steps, at least 0.
        group_size: For batch-level defenses, and only for them: how many rows are defended together. Rows
            ``0 .. group_size - 1`` of a batch are the first group, and so on.
        pad: Whether the last group is filled up with copies of the batch's first rows where rows are missing, instead
            of refusing the batch. The copies draw numbers of their own, and their logits are left out.
        checkpoint: See :class:`Purifier`.
        seed: Of the draws; None for fresh ones.

    Attributes:
        name: What it is called in texts such as ``"hd(steps=5)"``; empty where it cannot be made by name.
        part_class: Class of its trained part, which ``part_class.load`` reads from a file; None where it has none.
        training_class: Class of the settings of its training, whose ``fit`` makes that part.
        building_blocks: Its columns of the paper's table 1 (docs/settings_defenses.md), as in ``("IP", "IA", "R")``.
        random: Whether the logits of the same batch can differ.
        batch_level: Whether the logits of a row depend on the other rows of its group.
        needs_gradients: Whether :meth:`solve` needs gradients; they are switched on for it, regardless of the caller.
        output: What :meth:`readout` returns, ``"logits"`` or ``"probabilities"``.
        stretched: Settings for inputs in [0, 1] that the constructor multiplies by the width of ``bounds``.
        draw: Number of the next batch, for the draws.
    """

    __test__ = False

    name = ""
    part_class: ClassVar[Any] = None
    training_class: ClassVar[Any] = None
    building_blocks: ClassVar[tuple[str, ...]] = ()
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
            silent = own and not type(self).__dataclass_fields__[field.name].metadata
            if silent and (value := getattr(self, field.name)) != getattr(type(self), field.name, None):
                expected = f"only settings of {type(self).__name__}: {', '.join(own)}"
                raise InvalidArgumentError(field.name, value, expected)
        check_choice("output", self.output, ("logits", "probabilities"))
        check_integer("steps", self.steps, minimum=0)
        if self.batch_level and self.group_size is None:
            raise InvalidArgumentError("group_size", None, "the number of rows that this defense treats together")
        if self.group_size is not None and not self.batch_level:
            raise InvalidArgumentError("group_size", self.group_size, "None: this defense treats each row on its own")
        for name, minimum in (("group_size", 1), ("seed", 0)):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=minimum)
        if "bounds" in type(self).__dataclass_fields__:
            low, high = vars(self)["bounds"] = check_bounds(vars(self)["bounds"])
            for name in self.stretched:
                if (value := getattr(self, name)) is not None:
                    setattr(self, name, value * (high - low))
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
        """Return the constructor's arguments besides the classifier, from a part of :attr:`part_class`.

        It is tried on a few inputs ``(n, ...)``; an error there means that it was trained for another classifier.
        """
        raise NotImplementedError(f"{cls.__name__} has no trained part")

    @abstractmethod
    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Optimise for the rows ``(N, ...)``, at least one, of one group, or of any batch where rows are on their own.

        ``x`` stays unchanged; ``rng`` has the rows' random numbers; ``record``: whether the iterates are needed.
        """

    def readout(self, point: Tensor, state: State) -> Tensor:
        """Return the value named by :attr:`output`, ``(N, K)``, at a solution, each row on its own; differentiable."""
        out: Tensor = self.classifier(point)
        return out

    def logits(self, point: Tensor, state: State) -> Tensor:
        """The readout as logits ``(N, K)``: of probabilities, their logarithms, whose softmax they are again.

        A probability of 0 becomes the smallest that the type can hold, where the gradient is 0.
        """
        out = self.readout(point, state)
        if out.dim() != 2 or len(out) != len(point):
            rows = len(point)
            raise ModelError(f"readout: got shape {tuple(out.shape)} for {rows} rows, expected ({rows}, classes)")
        return out if self.output == "logits" else out.clamp_min(torch.finfo(out.dtype).tiny).log()

    def frozen(self, x: Tensor, *, inputs: Tensor, solution: Solution) -> Tensor:
        """Logits ``(N, K)`` of ``x`` with all that the defense had found for ``inputs``, its solution, held constant.

        Held are the change of the input and the state (Croce et al. 2022, section 3.3); a defense that holds something
        else overrides this. ``x`` and ``inputs`` are ``(N, ...)``, in the type of the solution.
        """
        final, inputs = solution.final.detach(), inputs.detach()
        moved = final - inputs
        # The rest is rounding: with it the inputs come out at their final points to the last bit.
        rest = final - (inputs + moved)
        return self.logits(x + moved + rest, solution.detached().state)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)`` of inputs ``(N, ...)``; ModelError where these are not a whole number of groups."""
        return self._trace(x, self.next_seeds(len(x)), record=False).logits

    def trace(self, x: Tensor, *, seeds: Tensor | Sequence[int] | None = None) -> Trace:
        """Run the defense on ``x``, floating point ``(N, ...)``, with the iterates.

        ``seeds``, one of at least 0 for each row, are those that :meth:`forward` would take when left out.
        """
        if seeds is None:
            return self._trace(x, self.next_seeds(len(x)), record=True)
        given = torch.as_tensor(seeds, dtype=torch.int64).cpu()
        if given.shape != x.shape[:1] or bool((given < 0).any()):
            raise InvalidArgumentError("seeds", seeds, f"{len(x)} integers of at least 0, one a row")
        return self._trace(x, given, record=True)

    def solution(self, x: Tensor, *, seeds: Tensor, record: bool = False) -> Solution:
        """Return the result of the inner steps for a batch ``(N, ...)`` of whole groups, without the readout.

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
        if given is None:
            given = seeds_of(rows, None if self.seed is None else stream(self.seed, "draw", self.next_draw()))
        return given

    def _trace(self, x: Tensor, seeds: Tensor, *, record: bool) -> Trace:
        x = self._as_input(x)
        found = self.solution(x, seeds=seeds, record=record)
        logits = self.logits(found.final, found.state) if len(x) else self.classifier(x)
        return Trace(found.final, found.iterates, found.state, inputs=x, logits=logits, seeds=seeds)

    def _grouped(self, x: Tensor, seeds: Tensor, *, record: bool) -> Solution:
        size, rows = self.group_size, len(x)
        if size is None:
            return self.solve(x, RowRNG(seeds), record=record)
        missing = -rows % size
        if missing and not self.pad:
            raise ModelError(
                f"test-time defense: got a batch of {rows} rows, expected a whole number of groups of {size}, which "
                "this defense treats together; send whole groups, or make the defense with pad=True"
            )
        if missing:
            # Copies of the first rows, over and over where there are few, which draw numbers of their own.
            copies = torch.arange(missing) % rows
            x = torch.cat([x, x[copies.to(x.device)]])
            own = [derive_seed(seed, "pad", number) for number, seed in enumerate(seeds[copies].tolist())]
            seeds = torch.cat([seeds, torch.tensor(own, dtype=torch.int64) if self.random else seeds[copies]])
        groups = zip(torch.split(x, size), torch.split(seeds, size), strict=True)
        return Solution.joined([self.solve(part, RowRNG(own), record=record) for part, own in groups], rows)

    def _as_input(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            shown = f"dtype {x.dtype}, shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgumentError("x", shown, "a floating point tensor of shape (N, ...)")
        # On numpy 2, some of ART's attacks send float64.
        types = [p.dtype for p in self.classifier.parameters() if p.is_floating_point()]
        return x.to(types[0]) if types else x

    def with_steps(self: Self, steps: int, *, checkpoint: bool | None = None) -> Self:
        """This defense with another number of inner steps; it shares the networks, and counts its own draws."""
        other = copy.copy(self)
        # A shallow copy shares the registers too, and a module set on one would appear on the other.
        for register in ("_parameters", "_buffers", "_modules"):
            setattr(other, register, getattr(self, register).copy())
        other.steps = check_integer("steps", steps, minimum=0)
        other.checkpoint = self.checkpoint if checkpoint is None else checkpoint
        return other


class Purifier(AdaptiveDefense):
    """A defense of ``steps`` equal steps on the input; a subclass implements :meth:`step` alone.

    The gradient of the whole flows through every step, which holds the graphs of all of them. With
    ``checkpoint=True`` no more than the points are held, and one step's graph at a time while the gradient is taken:
    each step is then done twice, and its parameters get no gradients.

    Example:
        >>> class Halved(Purifier):
        ...     def step(self, point, *, x, number, state, rng):
        ...         return point / 2
        >>> defense = Halved(torch.nn.Identity(), steps=3)
        >>> defense(torch.tensor([[8.0, 16.0]]))
        tensor([[1., 2.]])
        >>> [float(point[0, 0]) for point in defense.trace(torch.tensor([[8.0, 16.0]])).iterates]
        [8.0, 4.0, 2.0, 1.0]
    """

    @abstractmethod
    def step(self, point: Tensor, *, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        """The next point; the arguments stay unchanged, and the same ones give the same point.

        Gradients of losses at the point come from :func:`robust_ext.models.vjp.row_gradient`.

        Args:
            point: ``(N, ...)``.
            x: The input itself, ``(N, ...)``, for projections around it.
            number: Of the step, from 0; also a key for draws.
            state: As :meth:`start` made it.
            rng: The rows' random numbers.
        """

    def start(self, x: Tensor, rng: RowRNG) -> tuple[Tensor, State]:
        """The starting point ``(N, ...)``, and what all steps and the readout share: tensors of N rows, by name."""
        return x, {}

    def solve(self, x: Tensor, rng: RowRNG, *, record: bool) -> Solution:
        """Do the steps, see :meth:`AdaptiveDefense.solve`."""
        point, state = self.start(x, rng)
        iterates = [point]
        for number in range(self.steps):
            point = self._next(point, x, number, state, rng)
            if not record:
                iterates.clear()
            iterates.append(point)
        return Solution(point, tuple(iterates), state)

    def _next(self, point: Tensor, x: Tensor, number: int, state: State, rng: RowRNG) -> Tensor:
        if not (self.checkpoint and wants_gradient(point, x, *state.values())):
            return self.step(point, x=x, number=number, state=state, rng=rng)

        def again(point: Tensor, x: Tensor, *values: Tensor) -> Tensor:
            with torch.set_grad_enabled(torch.is_grad_enabled() or self.needs_gradients):
                held = dict(zip(state, values, strict=True))
                return self.step(point, x=x, number=number, state=held, rng=rng)

        return attach_checkpoint(again, point, x, *state.values())
