"""Transfer: points crafted on other networks, of which each row gets the one that is worst for the target.

Source: Croce et al., "Evaluating the Adversarial Robustness of Adaptive Test-time Defenses" (2022), sections 3.2, 3.4
and 4, where points crafted on the static network under a defense break it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.attacks._common.best import BestPoints
from robust_ext.attacks._common.rows import check_batch, hits, over_rows, project, query
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack, AttackTraits, check_attack, draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackError, InvalidArgumentError
from robust_ext.core.guard import frozen
from robust_ext.core.random import stream
from robust_ext.core.settings import Settings, setting, settings_class
from robust_ext.core.target import Target, module_device
from robust_ext.core.threat import NORMS, ThreatModel


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """The candidates of a transfer.

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
    names = [check_attack(attack, argument="attacks").name for attack in attacks]
    for attack in attacks:
        if names.count(attack.name) > 1:
            raise InvalidArgumentError("attacks", f"{attack.name} more than once", "names that differ; see as_attack")
        if attack.traits.detector:
            raise InvalidArgumentError("attacks", attack.name, "attacks on classifiers, as surrogates have no detector")
    return tuple(attacks)


@settings_class
class Transfer(Settings, Attack):
    """Crafts points on surrogates, and queries the target once for each.

    Every attack runs on every surrogate. The target gets no gradients and is sent the whole batch, in row order, once
    for each pair of them. Points that leave ball or bounds are taken back to the nearest point inside, and the input is
    replace points that are not finite. :meth:`run` returns more than candidates.

    Attacks should return the points of highest loss where they fail on a surrogate, as APGD does here: those that give
    the input back leave nothing to transfer. Each pair has a generator of its own, made of a seed drawn here and of
    both names, so its points do not depend on which others there are.

    Example:
        >>> Transfer(surrogates={"static": nn.Linear(4, 3)}, steps=50).name
        'Transfer(static)'
    """

    surrogates: Mapping[str, nn.Module] = setting(
        help="Networks by name, at least one, from inputs in the target's bounds to logits of the same classes; run in "
        "eval mode, where they are, and left as they were.",
        check=_check_surrogates,
    )
    attacks: Sequence[Attack] | None = setting(
        default=None,
        help="What is run on them, see :func:`robust_ext.as_attack`; their names must differ. Left out: APGD on "
        "cross-entropy, on the margin and on DLR aimed at three classes, each of ``steps`` steps.",
        check=_check_attacks,
    )
    steps: int = setting(default=100, help="Steps of the default attacks.", minimum=1)
    loss: str = setting(
        default="margin",
        help='By which the target\'s logits are compared, ``"margin"`` or ``"ce"``.',
        choices=("margin", "ce"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("name", f"Transfer({', '.join(self.surrogates)})")
        norms = tuple(norm for norm in NORMS if all(norm in attack.traits.norms for attack in self._attacks))
        traits = AttackTraits(batching="full", gradients=False, norms=norms, failure="best", seeds="generator")
        self._set("traits", traits)

    @property
    def _attacks(self) -> Sequence[Attack]:
        if self.attacks is not None:
            return self.attacks
        losses: tuple[dict[str, Any], ...] = ({}, {"loss": "margin"}, {"loss": "targeted-dlr", "target_classes": 3})
        return [APGD(steps=self.steps, **chosen) for chosen in losses]

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """See :meth:`Attack.cost`; what is sent through surrogates counts as if they were the target."""
        found = [attack.cost(threat_model, classes=classes) for attack in self._attacks]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        return (sum(known, Cost()) + Cost(len(found))) * len(self.surrogates)

    @property
    def description(self) -> str:
        """Names of the surrogates, and all settings."""
        attacks = ", ".join(attack.description for attack in self._attacks)
        return f"Transfer(surrogates={list(self.surrogates)}, attacks=[{attacks}], loss={self.loss!r})"

    def pursues(self, criterion: Criterion) -> bool:
        """See :meth:`Attack.pursues`: whether all its attacks on surrogates do."""
        found = [attack.pursues(criterion) for attack in self._attacks]  # Each may refuse
        return all(found)

    def search(self, target: Target, inputs: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the candidates of :meth:`run`, see :meth:`Attack.search`."""
        return self.run(target, inputs, labels, **options).candidates

    def run(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> TransferResult:
        """Return candidates and more, on the inputs' device; arguments are those of :meth:`Attack.search`.

        Raises:
            AttackRefusedError: One of the attacks makes no sense for this threat model.
            InvalidArgumentError: Inputs or labels are not as described, or a surrogate has other classes.
            AttackError: One of the attacks raised, or did not return points of the inputs' shape.
        """
        inputs, labels = check_batch(target, inputs, labels, threat_model)
        for attack in self._attacks:
            attack.check(threat_model=threat_model)
        seed = draw_seed(generator)
        best = BestPoints(inputs, labels, loss=self.loss, goal=target.criterion)
        origin = labels.new_full((len(inputs),), -1)
        sources = tuple((name, attack.name) for name in self.surrogates for attack in self._attacks)
        fooled = origin.new_zeros((len(sources), len(inputs)), dtype=torch.bool)
        for number, points in enumerate(self._craft(target, inputs, labels, threat_model, seed)):
            loss, solved = best.loss, best.solved
            logits = query(target, points)
            best.update(points, logits)
            origin = torch.where((best.loss != loss) | (best.solved != solved), number, origin)
            fooled[number] = hits(logits, labels, target.criterion)
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
                for attack in self._attacks:
                    draws = stream(seed, name, attack.name)
                    points = run_attack(attack, stand_in, x, y, threat_model=threat_model, generator=draws)
                    crafted.append(_inside(points, x, threat_model, name=attack.name).to(inputs.device))
            # The target is queried when the surrogate, which may be a part of it, is as it was.
            yield from crafted


def _stand_in(name: str, surrogate: nn.Module, x: Tensor, target: Target) -> Target:
    """A surrogate as the target of attacks."""
    with torch.no_grad():
        shape = tuple(surrogate(x[:1].clone()).shape)
    if shape != (1, target.classes):
        expected = f"logits (N, {target.classes}), the classes of the target in the same order"
        raise InvalidArgumentError("surrogates", f"{name!r} with logits of shape {shape}", expected)
    return Target(
        module=surrogate,
        bounds=target.bounds,
        classes=target.classes,
        input_shape=tuple(x.shape[1:]),
        device=x.device,
        criterion=target.criterion,
    )


def _inside(points: Tensor, inputs: Tensor, threat_model: ThreatModel, *, name: str) -> Tensor:
    """Points in ball and bounds, float32; those that are there already stay as they are."""
    if points.shape != inputs.shape:
        raise AttackError(f"{name}: returned shape {tuple(points.shape)}, expected {tuple(inputs.shape)}")
    finite = torch.isfinite(points).flatten(1).all(1)
    points = torch.where(over_rows(finite, points), points.detach().to(inputs), inputs)
    clipped = points.clamp(*threat_model.bounds)
    inside = threat_model.contains(clipped, inputs)
    return torch.where(over_rows(inside, inputs), clipped, project(points, inputs, threat_model))
