"""Running an attack on a target that it may not fit, in [0, 1] if it needs that, without a trace on the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, CallableAttack, draw_seed
from robust_ext.attacks.limited import search_within
from robust_ext.core.cost import Cost
from robust_ext.core.criteria import Criterion
from robust_ext.core.errors import AttackError, AttackRefusedError, DisturbedError, warn
from robust_ext.core.foreign import place_of, reported, text_of
from robust_ext.core.guard import guarded
from robust_ext.core.machine import OutOfMemory
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.black_box import black_box_in
from robust_ext.models.wrapping import PaddedClasses, Rescaled


class UnitSpace:
    """A target and a threat model stretched to the bounds [0, 1], and the way there and back.

    Where the bounds are (0, 1) already, or it is not ``needed``, all is left as it is, without a module around it.
    """

    def __init__(self, target: Target, threat_model: ThreatModel, *, needed: bool = True) -> None:
        self.bounds = threat_model.bounds
        self.target, self.threat_model = target, threat_model
        if needed and self.bounds != (0.0, 1.0):
            module = Rescaled(target.module, self.bounds)
            self.target = replace(map_points(target, self._stretched), module=module, bounds=(0.0, 1.0))
            self.threat_model = _unit(threat_model)

    def enter(self, x: Tensor) -> Tensor:
        """Points in the bounds, as points in [0, 1]."""
        return x if self.target.bounds == self.bounds else self._stretched(x)

    def leave(self, candidates: Tensor, inputs: Tensor) -> Tensor:
        """Candidates in [0, 1] as candidates in the bounds; values that were not changed are exactly the inputs'."""
        if self.target.bounds == self.bounds:
            return candidates
        low, high = self.bounds
        moved = (candidates * (high - low) + low).clamp(low, high)
        return torch.where(candidates == self.enter(inputs), inputs, moved)

    def _stretched(self, x: Tensor) -> Tensor:
        low, high = self.bounds
        return ((x - low) / (high - low)).clamp_(0, 1)


def _unit(threat_model: ThreatModel) -> ThreatModel:
    return ThreatModel(norm=threat_model.norm, epsilon=threat_model.epsilon / threat_model.width)


def map_points(target: Target, function: Callable[[Tensor], Tensor]) -> Target:
    """Return a target whose starting points and references, where it has them, went through a function."""
    points = {"starting_points": target.starting_points, "references": target.references}
    return replace(target, **{name: None if one is None else function(one) for name, one in points.items()})  # type: ignore[arg-type]


class UnitSpaceAttack(Attack):
    """An attack on classifiers with settings for inputs in [0, 1], run in the target's bounds.

    Example:
        >>> from robust_ext.attacks.apgd import APGD
        >>> UnitSpaceAttack(APGD()).description
        "APGD(steps=100, ...), settings for inputs in [0, 1]"
    """

    def __init__(self, attack: Attack) -> None:
        self.attack, self.name, self.traits, self.code_text = attack, attack.name, attack.traits, attack.code_text

    @property
    def description(self) -> str:
        """The attack's, and what its settings are for."""
        return f"{self.attack.description}, settings for inputs in [0, 1]"

    def refusal(self, *, threat_model: ThreatModel, detector: bool = False) -> str | None:
        """The attack's."""
        return self.attack.refusal(threat_model=threat_model, detector=detector)

    def pursues(self, criterion: Criterion) -> bool:
        """The attack's."""
        return self.attack.pursues(criterion)

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """The attack's."""
        return self.attack.cost(_unit(threat_model), classes=classes)

    def search(
        self, target: Target, inputs: Tensor, labels: Tensor, *, threat_model: ThreatModel, generator: torch.Generator
    ) -> Tensor:
        """Run the attack on the stretched target, see :meth:`Attack.search`."""
        space = UnitSpace(target, threat_model)
        model, x = space.threat_model, space.enter(inputs)
        found = self.attack.search(space.target, x, labels, threat_model=model, generator=generator)
        return space.leave(found, inputs)


def run_attack(
    attack: Attack,
    target: Target,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    generator: torch.Generator,
) -> Tensor:
    """Run an attack, which :meth:`Attack.check` has let pass, on copies; what it returns is not verified.

    Arguments are those of :meth:`Attack.search`; for the target and errors see :func:`undisturbed`.
    """
    with undisturbed(attack, target, generator) as shown:
        x, y = inputs.clone(), labels.clone()
        search = search_within(attack, threat_model)
        return search(shown, x, y, threat_model=threat_model, generator=generator)


def refuse_gradients(attacks: Iterable[Attack], module: nn.Module) -> None:
    """Raise AttackRefusedError where one of the attacks needs gradients, and the module holds a black box.

    A user's own function does not state whether it does.
    """
    inside = black_box_in(module)
    if inside is None:
        return
    for one in attacks:
        if one.traits.gradients and not isinstance(one, CallableAttack):
            kind, square = ("labels", "") if inside.labels_only else ("scores or labels", "robust_ext:Square, ")
            raise AttackRefusedError(
                f"{one.name} needs gradients, and the model is a black box, which has none; use an attack by {kind}: "
                f"{square}robust_ext:RayS (linf), foolbox:HopSkipJumpAttack or art:HopSkipJump"
            )


@contextmanager
def undisturbed(attack: Attack, target: Target, generator: torch.Generator) -> Iterator[Target]:
    """A target for the run of one attack inside the block, which is left as it was; see the two that it consists of."""
    with guarding(attack, target), exposed(attack, target, generator) as shown:
        yield shown


@contextmanager
def guarding(
    attack: Attack, target: Target, *, original: Target | None = None, probe: Callable[[], Iterable[str]] = tuple
) -> Iterator[None]:
    """Undo what an attack leaves changed inside the block, also where it raises.

    A setting of the process is a warning. Weights, submodules and hooks of the network are a DisturbedError, as is
    another change that ``probe`` finds. Where the target is a copy, its ``original`` is guarded too.
    """
    originals = () if original is None else _networks(original)
    with guarded(*_networks(target), originals=originals, probe=probe) as found:
        yield
    if found.process:
        warn(f"{attack.name} left {', '.join(found.process)} changed, which was put back")
    if found.network:
        shown = "; ".join(found.network[:3]) + ("; ..." if len(found.network) > 3 else "")
        raise DisturbedError(
            f"{attack.name}: changed what it attacks or is judged by ({shown}); what changed of the model was put "
            "back, and what the attack returned is not used: let it work on a copy (copy.deepcopy of the model)"
        )


@contextmanager
def exposed(attack: Attack, target: Target, generator: torch.Generator) -> Iterator[Target]:
    """A target as an attack sees it inside the block: padded where it has too few classes.

    Random detectors are seeded from the generator. Whatever the attack raises becomes an AttackError, also an exit of
    the process. Errors that this project raises on the way and the user's Ctrl-C stay what they are.
    """
    if target.classes < attack.traits.minimum_classes:
        classes = attack.traits.minimum_classes
        target = replace(target, module=PaddedClasses(target.module, classes=classes), classes=classes)
    with _named(attack.name), ExitStack() as stack:
        if target.defended is not None and target.defended.detector.random:
            # Random detectors draw from the global generator.
            stack.enter_context(seeded_globals(draw_seed(generator)))
        # The attack may change its points.
        yield map_points(target, torch.clone)


def _networks(target: Target) -> list[nn.Module]:
    return [target.module] if target.defended is None else [target.module, target.defended]


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors that name the attack."""
    with reported(lambda error: AttackError(f"{name}: {_words_of(error)}")) as interrupts:
        yield
    if interrupts:
        # The attack caught it.
        raise KeyboardInterrupt


def _words_of(error: BaseException) -> str:
    """Return the message of an attack's exception, with the next step."""
    if isinstance(error, SystemExit):
        return f"tried to exit the process with status {text_of(error)}; raise an exception where it cannot go on"
    if isinstance(error, OutOfMemory):
        # What an attack finds may depend on its batch, so it is not made smaller here.
        return (
            f"out of memory ({text_of(error).partition('.')[0]}); lower batch_size (--batch-size), the number of "
            "samples attacked at once"
        )
    return f"raised {type(error).__name__}: {text_of(error) or place_of(error)}"
