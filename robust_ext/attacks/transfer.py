"""Transfer: points crafted on other networks, of which each row gets the one that is worst for the target.

Source: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), sections 3.2, 3.4
and 4, where points crafted on the static network under a defense break it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best_points import BestPoints
from robust_ext.attacks._common.projections import project
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackError, InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.target import Target, frozen, module_device
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.core.validation import check_choice, check_inputs, check_integer, check_labels
from robust_ext.registry.attack import as_attack

LOSSES = ("margin", "ce")


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """What a transfer found.

    Args:
        candidates: Of each row, the point of highest loss on the target among those it misclassifies; of all where it
            misclassifies none, ``(N, ...)``.
        found: Whether the target misclassified the candidate, bool ``(N,)``.
        losses: Of the target at the candidates, ``(N,)``; -inf where it has none.
        sources: Names of surrogate and attack, one pair for each candidate that a row was offered.
        origin: Which of the sources each candidate is from, int64 ``(N,)``; -1 where it is the input, as no loss was
            a number.
        fooled: Which rows the points of each source fool, bool ``(sources, N)``.
    """

    candidates: Tensor
    found: Tensor
    losses: Tensor
    sources: tuple[tuple[str, str], ...]
    origin: Tensor
    fooled: Tensor


class Transfer(Attack):
    """Crafts points on surrogates, and asks the target once about each.

    Every attack runs on every surrogate. The target gets no gradients and is sent the whole batch, in row order, once
    for each pair of them. Points that leave ball or bounds are taken back to the nearest point inside, and the input is
    put in the place of points that are not finite.

    Attacks should return the points of highest loss where they fail on a surrogate, as APGD does here: those that give
    the input back leave nothing to transfer. Each pair has a generator of its own, made of a seed drawn here and of
    both names, so its points do not depend on which others there are.

    Args:
        surrogates: Networks by name, at least one, from inputs in the target's bounds to logits of the same classes;
            run in eval mode, where they are, and left as they were.
        attacks: Attacks, or what :func:`robust_ext.as_attack` makes some of; their names must differ. Left out:
            APGD on cross-entropy, on the margin and on DLR aimed at three classes, each of ``steps`` steps.
        steps: Of the attacks where they are left out, at least 1.
        loss: By which the target's answers are compared, ``"margin"`` or ``"ce"``.

    Attributes:
        result: What the latest call of :meth:`generate` found; None before the first.

    Raises:
        InvalidArgumentError: A setting is not accepted, or an attack needs a detector.

    Example:
        >>> Transfer(surrogates={"static": nn.Linear(4, 3)}, steps=50)
        Transfer(Transfer(static))
    """

    def __init__(
        self,
        *,
        surrogates: Mapping[str, nn.Module],
        attacks: Sequence[object] | None = None,
        steps: int = 100,
        loss: str = "margin",
    ) -> None:
        self.surrogates = _check_surrogates(surrogates)
        steps = check_integer("steps", steps, minimum=1)
        self.attacks = _check_attacks(_default_attacks(steps) if attacks is None else attacks)
        self.loss = check_choice("loss", loss, LOSSES)
        self.name = f"Transfer({', '.join(self.surrogates)})"
        norms = tuple(norm for norm in NORMS if all(norm in attack.traits.norms for attack in self.attacks))
        self.traits = AttackTraits(batching="full", gradients=False, norms=norms, failure="best", seeds="generator")
        self.result: TransferResult | None = None

    @property
    def description(self) -> str:
        """Names of the surrogates, and all settings."""
        attacks = ", ".join(attack.description for attack in self.attacks)
        return f"Transfer(surrogates={list(self.surrogates)}, attacks=[{attacks}], loss={self.loss!r})"

    def generate(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Return the candidates of :meth:`run`, and keep all it found; see :meth:`Attack.generate`."""
        self.result = self.run(target, inputs, labels, threat_model=threat_model, generator=generator)
        return self.result.candidates

    def run(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> TransferResult:
        """Craft, ask and choose.

        Args:
            target: What may be queried; asked without gradients.
            inputs: Floating point ``(N, ...)`` in the threat model's bounds, taken as float32; not changed.
            labels: int64 ``(N,)``, the true labels.
            threat_model: The norm, epsilon and bounds.
            generator: CPU generator, the only source of randomness.

        Raises:
            AttackRefusedError: One of the attacks makes no sense for this threat model.
            InvalidArgumentError: Inputs or labels are not as described, or a surrogate has other classes.
            AttackError: One of the attacks raised, or did not return points of the inputs' shape.
        """
        inputs = check_inputs("inputs", inputs, bounds=threat_model.bounds)
        labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
        for attack in self.attacks:
            attack.check(threat_model=threat_model)
        seed = draw_seed(generator)
        best = BestPoints(inputs, labels, loss=self.loss, targeted=False)
        origin = labels.new_full((len(inputs),), -1)
        sources = tuple((name, attack.name) for name in self.surrogates for attack in self.attacks)
        fooled = origin.new_zeros((len(sources), len(inputs)), dtype=torch.bool)
        for number, points in enumerate(self._craft(target, inputs, labels, threat_model, seed)):
            loss, solved = best.loss, best.solved
            with torch.no_grad():
                # A copy, as a module may work on its input in place.
                logits = target.module(points.clone())
            best.update(points, logits)
            origin = torch.where((best.loss != loss) | (best.solved != solved), number, origin)
            fooled[number] = (logits.argmax(1) != labels) & ~logits.isnan().any(1)
        return TransferResult(
            candidates=best.points, found=best.solved, losses=best.loss, sources=sources, origin=origin, fooled=fooled
        )

    def _craft(
        self, target: Target, inputs: Tensor, labels: Tensor, threat_model: ThreatModel, seed: int
    ) -> Iterator[Tensor]:
        """Points ``(N, ...)`` of each source, in order; none for no inputs."""
        for name, surrogate in self.surrogates.items() if len(inputs) else ():
            place = module_device(surrogate)
            x, y = inputs.to(place), labels.to(place)
            crafted = []
            with frozen(surrogate):
                surrogate.eval()
                stand_in = _stand_in(name, surrogate, x, target)
                for attack in self.attacks:
                    draws = stream(seed, name, attack.name)
                    points = run_attack(attack, stand_in, x, y, threat_model=threat_model, generator=draws)
                    crafted.append(_inside(points, x, threat_model, name=attack.name).to(inputs.device))
            # The target is asked when the surrogate, which may be a part of it, is as it was.
            yield from crafted


def _default_attacks(steps: int) -> list[Attack]:
    aimed = APGD(steps=steps, loss="targeted-dlr", target_classes=3)
    return [APGD(steps=steps, loss="ce"), APGD(steps=steps, loss="margin"), aimed]


def _check_surrogates(surrogates: object) -> dict[str, nn.Module]:
    expected = "a mapping from names to torch modules, at least one, such as {'static': network}"
    if not isinstance(surrogates, Mapping) or not surrogates:
        raise InvalidArgumentError("surrogates", type(surrogates).__name__ if surrogates else surrogates, expected)
    for name, module in surrogates.items():
        if not isinstance(name, str) or not isinstance(module, nn.Module):
            raise InvalidArgumentError("surrogates", f"{name!r}: {type(module).__name__}", expected)
    return dict(surrogates)


def _check_attacks(attacks: object) -> tuple[Attack, ...]:
    if isinstance(attacks, str) or not isinstance(attacks, Sequence) or not attacks:
        raise InvalidArgumentError("attacks", repr(attacks), "a list of attacks, at least one")
    resolved = tuple(as_attack(attack, argument="attacks") for attack in attacks)
    names = [attack.name for attack in resolved]
    for attack in resolved:
        if names.count(attack.name) > 1:
            raise InvalidArgumentError("attacks", f"{attack.name} more than once", "names that differ; see as_attack")
        if attack.traits.detector:
            raise InvalidArgumentError("attacks", attack.name, "attacks on classifiers, as surrogates have no detector")
    return resolved


def _stand_in(name: str, surrogate: nn.Module, x: Tensor, target: Target) -> Target:
    """A surrogate as the target of attacks."""
    with torch.no_grad():
        shape = tuple(surrogate(x[:1].clone()).shape)
    if shape != (1, target.classes):
        expected = f"logits (N, {target.classes}), the classes of the target in the same order"
        raise InvalidArgumentError("surrogates", f"{name!r} with an answer of shape {shape}", expected)
    return Target(
        module=surrogate, bounds=target.bounds, classes=target.classes, input_shape=tuple(x.shape[1:]), device=x.device
    )


def _inside(points: Tensor, inputs: Tensor, threat_model: ThreatModel, *, name: str) -> Tensor:
    """Points in ball and bounds, float32; those that are there already stay as they are."""
    if points.shape != inputs.shape:
        raise AttackError(f"{name}: returned shape {tuple(points.shape)}, expected {tuple(inputs.shape)}")
    shape = (-1, *[1] * (inputs.dim() - 1))
    finite = torch.isfinite(points).flatten(1).all(1).view(shape)
    points = torch.where(finite, points.detach().to(inputs), inputs)
    clipped = points.clamp(*threat_model.bounds)
    inside = threat_model.contains(clipped, inputs).view(shape)
    return torch.where(inside, clipped, project(points, inputs, threat_model))
