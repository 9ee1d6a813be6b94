"""Running an attack on a target that it may not fit, in [0, 1] if it needs that, without a trace on the target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, draw_seed
from robust_ext.core.cost import Cost
from robust_ext.core.errors import AttackError, DisturbedError, warn
from robust_ext.core.foreign import place_of, reported, text_of
from robust_ext.core.guard import guarded
from robust_ext.core.memory import OutOfMemory
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.models.normalized import PaddedClasses, Rescaled


class UnitSpace:
    """A target and a threat model stretched to the bounds [0, 1], and the way there and back.

    Where the bounds are (0, 1) already, or it is not ``needed``, all is left as it is, without a module around it.
    """

    def __init__(self, target: Target, threat_model: ThreatModel, *, needed: bool = True) -> None:
        self.bounds = threat_model.bounds
        self.target, self.threat_model = target, threat_model
        if needed and self.bounds != (0.0, 1.0):
            points = (target.starting_points, target.references)
            starts, references = (None if one is None else self._stretched(one) for one in points)
            module = Rescaled(target.module, self.bounds)
            self.target = replace(
                target, module=module, bounds=(0.0, 1.0), starting_points=starts, references=references
            )
            self.threat_model = ThreatModel(norm=threat_model.norm, epsilon=threat_model.epsilon / threat_model.width)

    def enter(self, x: Tensor) -> Tensor:
        """Points in the bounds, as points in [0, 1]."""
        if self.target.bounds == self.bounds:
            return x
        return self._stretched(x)

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

    def cost(self, threat_model: ThreatModel, *, classes: int) -> Cost | None:
        """The attack's."""
        epsilon = threat_model.epsilon / threat_model.width
        return self.attack.cost(ThreatModel(norm=threat_model.norm, epsilon=epsilon), classes=classes)

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
    ) -> Tensor:
        """Run the attack on the stretched target, see :meth:`Attack.search`."""
        space = UnitSpace(target, threat_model)
        found = self.attack.search(
            space.target, space.enter(inputs), labels, threat_model=space.threat_model, generator=generator
        )
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
        return attack.search(shown, inputs.clone(), labels.clone(), threat_model=threat_model, generator=generator)


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
        yield _copied(target)


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


def _copied(target: Target) -> Target:
    """A target whose points an attack may change."""
    starts, references = target.starting_points, target.references
    return replace(
        target,
        starting_points=None if starts is None else starts.clone(),
        references=None if references is None else references.clone(),
    )
