"""Running an attack on a target that it may not fit as it is, without leaving a trace on the target."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from robust_ext.attacks.base import Attack, draw_seed
from robust_ext.core.errors import AttackError, RobustExtError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target, frozen
from robust_ext.core.threat import ThreatModel
from robust_ext.models.padded import PaddedClasses


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
    """A target for the run of one attack inside the block, padded where it has too few classes, and left as it was.

    Random detectors are seeded from the generator. Anything else than an error of this project that is raised inside
    becomes an AttackError, and so do weights that were changed in place.
    """
    if target.classes < attack.traits.minimum_classes:
        classes = attack.traits.minimum_classes
        target = replace(target, module=PaddedClasses(target.module, classes=classes), classes=classes)
    # Every change in place raises a tensor's version, whatever it is made by.
    before = [(name, parameter, parameter._version) for name, parameter in target.module.named_parameters()]
    try:
        with ExitStack() as stack:
            stack.enter_context(frozen(target.module))
            if target.defended is not None:
                stack.enter_context(frozen(target.defended))
                if target.defended.detector.random:
                    # Random detectors draw from the global generator.
                    stack.enter_context(seeded_globals(draw_seed(generator)))
            yield target
    except RobustExtError:
        raise
    except Exception as error:
        raise AttackError(f"{attack.name}: raised {type(error).__name__}: {error}") from error
    changed = [name for name, parameter, version in before if parameter._version != version]
    if changed:
        raise AttackError(
            f"{attack.name}: changed the network's weights in place ({', '.join(changed[:3])}); what is left is no "
            "longer the network to be tested: load it anew, and hand the attack a copy"
        )
