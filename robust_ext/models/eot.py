"""EoT: a random module averaged over draws, in memory that does not grow with their number.

Source: Athalye, Engstrom, Ilyas and Kwok, "Synthesizing Robust Adversarial Examples" (2018), section 2.1; for test-time
defenses Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.modules import SettingsModule, module_class, positional
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.settings import LARGEST_SEED, setting
from robust_ext.core.validation import check_choice, check_integer
from robust_ext.models.rows import Drawing, given_seeds, row_seeds, seeds_of
from robust_ext.models.vjp import VJP, attach, row_gradient, wants_gradient, with_vjp
from robust_ext.models.wrapping import module_of

VALUES = ("last", "logits", "softmax")
GRADIENTS = ("mean", "logits", "softmax")


@dataclass(frozen=True)
class Expected:
    """Losses, their gradient and logits to decide by, over draws.

    Attributes:
        losses: ``(N,)``, of the logits that ``loss`` of :class:`EoT` names.
        gradient: Of the input, ``(N, ...)``.
        logits: ``(N, K)``, those that ``decision`` names.
    """

    losses: Tensor
    gradient: Tensor
    logits: Tensor


@module_class
class EoT(Drawing, SettingsModule):
    """Logits over several draws of a random module, with a gradient over the same draws.

    Values: ``"last"``: the logits of the last draw. ``"logits"``: the mean of the logits. ``"softmax"``: the logarithm
    of the mean of the softmax. Gradients: ``"mean"``: the mean over draws of what each draw's own graph makes of the
    gradient of the loss by the logits. ``"logits"`` and ``"softmax"``: of the values of that name.

    As a module it does not get the loss, so all draws get the gradient of the loss at the value it returned, and
    ``"mean"`` is the same as ``"logits"``; :meth:`value_and_gradient` gets the loss. Where no gradient is wanted, the
    value is ``decision``'s, else ``loss``'s: an attack that reads decisions off the outputs it differentiates needs
    both alike.

    Draws depend on (seed, call, draw, row): a test-time defense inside, however deep, draws for each row on its own,
    and ``chunk`` changes nothing but memory. Other modules draw from the global generators of torch, numpy and
    ``random``, seeded for each chunk and put back after it; there the chunk's size counts as a setting.

    No more than one chunk's graph is held at a time, and none between forward and backward pass, where all draws run
    once more; in one chunk that holds all draws they run once, and the graph is held. Parameters get no gradients.

    Attributes:
        draw: Number of the next call; set it to repeat one.

    Example:
        >>> averaged = EoT(nn.Dropout(0.5).train(), draws=1000, chunk=100, seed=0)
        >>> averaged(torch.ones(1, 2)).round()
        tensor([[1., 1.]])
    """

    module: nn.Module = positional(
        "A module from inputs ``(N, ...)`` to logits ``(N, K)``, each row on its own or in groups that N is a "
        "multiple of; or a model of any kind that :func:`robust_ext.as_module` takes, as a Foolbox model or an ART "
        "classifier.",
        kw_only=False,
    )
    draws: int = setting(help="Number of draws.", minimum=1)
    chunk: Any = setting(
        default=None,
        help="How many draws go through the module in one batch of ``chunk x N`` rows, draw after draw; 1 when left "
        "out. More need more memory, and a module that takes batches of any size.",
        check=lambda chunk: check_integer("chunk", chunk, minimum=1),
    )
    gradient: str = setting(default="mean", help='``"mean"``, ``"logits"`` or ``"softmax"``.', choices=GRADIENTS)
    loss: str = setting(default="logits", help='``"last"``, ``"logits"`` or ``"softmax"``.', choices=VALUES)
    decision: Any = setting(default=None, help="The same choices; that of ``loss`` when left out.")
    seed: int | None = setting(
        default=None,
        help="Seed of all draws; a fresh one for each call from torch's global generator when left out.",
        minimum=0,
        maximum=LARGEST_SEED,
    )
    fixed: bool = setting(default=False, help="Whether every call makes the same draws; needs a seed.")

    def __post_init__(self) -> None:
        self.module = module_of(self.module)
        self.chunk = 1 if self.chunk is None else self.chunk
        super().__post_init__()
        self.decision = self.loss if self.decision is None else check_choice("decision", self.decision, VALUES)
        if self.fixed and self.seed is None:
            raise InvalidArgumentError("fixed", self.fixed, "False, or a seed to fix the draws by")
        self.draw, self.training = 0, False

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(N, K)``, or log-probabilities, of inputs ``(N, ...)``."""
        key = self._next_key(len(x))
        if not wants_gradient(x):
            with torch.no_grad():
                return self._values(x, key, {self.decision})[self.decision]
        if self.draws <= self.chunk:
            return attach(partial(self._held, key), x)
        return attach(partial(self._repeated, key), x)

    def value_and_gradient(self, x: Tensor, labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> Expected:
        """Losses and their gradient over one call's draws.

        Args:
            x: Floating point ``(N, ...)``; gets no gradient itself.
            labels: int64 ``(N,)``.
            loss: From logits ``(N, K)`` and labels ``(N,)`` to losses ``(N,)``.
        """
        key = self._next_key(len(x))
        with torch.no_grad():
            wanted = {self.loss, self.decision}
            if self.gradient == "mean":
                mean = _RunningMean(wanted, self.draws)

                def of_own_losses(out: Tensor) -> Tensor:
                    mean.add(out)
                    # Repeated inside, where the caller's inference mode is off.
                    gradient = row_gradient(lambda logits: loss(logits, labels.repeat(len(out))), out.flatten(0, 1))
                    return gradient.view_as(out) / self.draws

                gradient = self._pulled(x, key, of_own_losses)
                values = mean.values()
            else:
                values = self._values(x, key, wanted | {self.gradient})
                cotangent = row_gradient(lambda logits: loss(logits, labels), values[self.gradient])
                spread = partial(_spread, cotangent=cotangent, draws=self.draws, log_mean=self._log_mean(values))
                gradient = self._pulled(x.detach(), key, spread)
            return Expected(loss(values[self.loss], labels), gradient, values[self.decision])

    def _next_key(self, rows: int) -> int:
        """The seed of this call's draws; the call counts as made."""
        given = given_seeds(rows)
        if given is not None:
            # Inside another expectation, whose draws have to come out the same a second time.
            return int(given[0]) if rows else 0
        return int(seeds_of(1)) if self.seed is None else derive_seed(self.seed, "call", self.next_draw())

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Number of the first draw and how many there are, of each chunk."""
        for first in range(0, self.draws, self.chunk):
            yield first, min(self.chunk, self.draws - first)

    def _run(self, key: int, first: int, count: int, x: Tensor) -> Tensor:
        """Logits ``(count, N, K)`` of some draws."""
        seeds = torch.cat([seeds_of(len(x), stream(key, "draw", draw)) for draw in range(first, first + count)])
        rows = x.repeat(count, *[1] * (x.dim() - 1))
        with row_seeds(seeds), seeded_globals(derive_seed(key, "chunk", first)):
            out: Tensor = self.module(rows)
        return out.reshape(count, len(x), *out.shape[1:])

    def _values(self, x: Tensor, key: int, wanted: Collection[str]) -> dict[str, Tensor]:
        mean = _RunningMean(wanted, self.draws)
        for chunk in self._chunks():
            mean.add(self._run(key, *chunk, x))
        return mean.values()

    def _held(self, key: int, x: Tensor) -> tuple[Tensor, VJP]:
        out, vjp = with_vjp(partial(self._run, key, 0, self.draws), x)
        mean = _RunningMean({self.loss, self.gradient}, self.draws)
        mean.add(out)
        values = mean.values()
        spread = partial(_spread, draws=self.draws, log_mean=self._log_mean(values))
        return values[self.loss], lambda cotangent: vjp(spread(out, cotangent=cotangent))

    def _repeated(self, key: int, x: Tensor) -> tuple[Tensor, VJP]:
        values = self._values(x, key, {self.loss, self.gradient})
        # A copy, as the caller may change its input in place.
        held, spread = x.clone(), partial(_spread, draws=self.draws, log_mean=self._log_mean(values))
        return values[self.loss], lambda cotangent: [self._pulled(held, key, partial(spread, cotangent=cotangent))]

    def _log_mean(self, values: dict[str, Tensor]) -> Tensor | None:
        return values["softmax"] if self.gradient == "softmax" else None

    def _pulled(self, x: Tensor, key: int, cotangent: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient ``(N, ...)`` over all draws, from what maps a chunk's logits ``(count, N, K)`` to theirs."""

        # In a function of its own, so that the chunk's graph is freed before the next one's is built.
        def of_chunk(first: int, count: int) -> Tensor:
            out, vjp = with_vjp(partial(self._run, key, first, count), x)
            (gradient,) = vjp(cotangent(out))
            assert gradient is not None
            return gradient

        total = torch.zeros_like(x)
        for first, count in self._chunks():
            total += of_chunk(first, count)
        return total


class _RunningMean:
    """The last logits, the mean of the logits, and the logarithm of the mean softmax, over draws in chunks."""

    def __init__(self, wanted: Collection[str], draws: int) -> None:
        self._wanted, self._draws = wanted, draws
        self._found: dict[str, Tensor] = {}

    def add(self, out: Tensor) -> None:
        """Take in the logits ``(count, N, K)`` of some draws."""
        found = self._found
        if "last" in self._wanted:
            found["last"] = out[-1]
        if "logits" in self._wanted:
            total = out.sum(0)
            found["logits"] = total + found["logits"] if "logits" in found else total
        if "softmax" in self._wanted:
            total = out.log_softmax(2).logsumexp(0)
            found["softmax"] = torch.logaddexp(total, found["softmax"]) if "softmax" in found else total

    def values(self) -> dict[str, Tensor]:
        """Each aggregate, ``(N, K)``."""
        finish: dict[str, Callable[[Tensor], Tensor]] = {
            "last": Tensor.clone,
            "logits": lambda total: total / self._draws,
            "softmax": lambda total: total - math.log(self._draws),
        }
        return {name: finish[name](total) for name, total in self._found.items()}


def _spread(out: Tensor, cotangent: Tensor, *, draws: int, log_mean: Tensor | None) -> Tensor:
    """From the gradient ``(N, K)`` by an aggregate of draws to that by the logits ``(count, N, K)`` of some of them.

    ``log_mean`` ``(N, K)`` is the aggregate where it is the logarithm of the mean softmax, None where it is the mean.
    """
    if log_mean is None:
        return (cotangent / draws).expand_as(out)
    logarithms = out.log_softmax(2)
    # Each draw's part in the mean of the softmax comes from logarithms, as the mean itself may be 0 as a float.
    share = cotangent * (logarithms - log_mean).exp() / draws
    return share - logarithms.exp() * share.sum(2, keepdim=True)
