"""Running an attack on a target that it may not fit as it is, without leaving a trace on the target."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from robust_ext.attacks.base import Attack, draw_seed
from robust_ext.core.errors import AttackError, DisturbedError, RobustExtError
from robust_ext.core.intact.guard import guarded
from robust_ext.core.memory import OutOfMemory
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.warning import warn
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

    Random detectors are seeded from the generator. What the attack leaves changed is put back, also where it raises,
    see :func:`robust_ext.core.intact.guard.guarded`: settings of the process with a warning, the network and what runs
    it with a DisturbedError. Anything else than an error of this project that is raised inside becomes an AttackError,
    an exit of the process too.
    """
    if target.classes < attack.traits.minimum_classes:
        classes = attack.traits.minimum_classes
        target = replace(target, module=PaddedClasses(target.module, classes=classes), classes=classes)
    networks: list[nn.Module] = [target.module] if target.defended is None else [target.module, target.defended]
    with _named(attack.name), guarded(*networks) as found, ExitStack() as stack:
        # Their place is inside: the guard then finds them as they were.
        if target.defended is not None and target.defended.detector.random:
            # Random detectors draw from the global generator.
            stack.enter_context(seeded_globals(draw_seed(generator)))
        yield _copied(target)
    if found.left:
        warn(f"{attack.name} left {', '.join(found.left)} changed, which was put back")
    if found.network:
        shown = "; ".join(found.network[:3]) + ("; ..." if len(found.network) > 3 else "")
        raise DisturbedError(
            f"{attack.name}: changed what it attacks or is judged by ({shown}); everything was put back, and what it "
            "returned is not used: let it work on a copy (copy.deepcopy of the model)"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors that name the attack."""
    try:
        yield
    except (RobustExtError, KeyboardInterrupt, GeneratorExit):
        raise
    except SystemExit as error:
        raise AttackError(
            f"{name}: tried to exit the process with status {error.code}; raise an exception where it cannot go on"
        ) from error
    except OutOfMemory as error:
        # What an attack finds may depend on its batch, so it is not made smaller here.
        raise AttackError(
            f"{name}: out of memory ({str(error).partition('.')[0]}); lower batch_size (--batch-size), the number of "
            "samples attacked at once"
        ) from error
    except BaseException as error:
        raise AttackError(f"{name}: raised {type(error).__name__}: {_words_of(error)}") from error


def _words_of(error: BaseException) -> str:
    """The text of an error; of one without, as of a bare ``assert``, the line of code that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    return str(error) or "; ".join(f"at `{one.line}` ({Path(one.filename).name}, line {one.lineno})" for one in last)


def _copied(target: Target) -> Target:
    """A target whose points an attack may change."""
    starts, references = target.starting_points, target.references
    return replace(
        target,
        starting_points=None if starts is None else starts.clone(),
        references=None if references is None else references.clone(),
    )
