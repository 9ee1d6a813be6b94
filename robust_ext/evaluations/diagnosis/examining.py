"""An attack on labelled samples and on planted problems, and others on the same samples to compare it with."""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from robust_ext.attacks.adapted import AdaptedAttack, adaptation_words
from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.square import Square
from robust_ext.core.errors import (
    AttackError,
    AttackRefusedError,
    InvalidArgumentError,
    ModelError,
    OutOfTimeError,
    collecting,
)
from robust_ext.core.settings import default_of
from robust_ext.engine.context import is_over
from robust_ext.engine.estimate import Estimate, estimate
from robust_ext.engine.identity import describe
from robust_ext.engine.inputs import EvaluationInputs
from robust_ext.engine.run import Outcome
from robust_ext.engine.running import run_all
from robust_ext.engine.store import Record
from robust_ext.engine.task import Worker, drive
from robust_ext.engine.verify import BROKEN
from robust_ext.evaluations.arms import Arm, ArmRun, plan_runs
from robust_ext.evaluations.binarization import BinarizationResult, binarization_test
from robust_ext.evaluations.causes.attaching import as_entry
from robust_ext.evaluations.causes.evidence import Entry
from robust_ext.evaluations.caveats import Part, parts_of
from robust_ext.evaluations.diagnosis.settings import DiagnosisSettings
from robust_ext.evaluations.scored_runs import plan_clean

ONE_STEP, ASCENT, SQUARE, RANDOM = "one gradient step", "APGD on the margin", "Square", "random points"
SMOOTHED = "APGD on the smoothed model"
# Settings of an adapted attack by which it sees other gradients or logits than those of the model.
_VIEW = ("bpda", "gradient_mode", "steps", "eot", "noise", "temperature")
# The budgets besides epsilon: twice it, and the whole range of inputs.
ROLES = ("larger", "unbounded")
_OVER = "the time that was given was over"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """The results of an attack on the samples, at one budget."""

    name: str
    attack: Attack
    epsilon: float
    slack: float  # What a candidate may lie beyond epsilon
    records: Sequence[Record] = ()  # One a sample; none where it raised
    curve: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    passes: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None  # What it raised

    def solved(self, index: int) -> bool:
        """Return whether it broke a sample within the budget."""
        record = self.records[index]
        distance = record["distance"]
        return record["outcome"] in BROKEN and distance is not None and distance <= self.epsilon + self.slack

    def robust(self, correct: Sequence[bool]) -> list[int]:
        """Return the samples that are robust as far as the attack shows."""
        return [index for index in range(len(self.records)) if correct[index] and not self.solved(index)]

    def accuracy(self, correct: Sequence[bool]) -> float | None:
        """Return the robust accuracy; None where it raised."""
        return len(self.robust(correct)) / len(self.records) if self.records else None

    def entries(self, correct: Sequence[bool], random: Ran | None = None) -> list[Entry]:
        """Its records as indicators take them; ``random`` is what random points came to on the same samples."""
        found = []
        for index, record in enumerate(self.records):
            hit = None if random is None else random.solved(index)
            entry = as_entry(record, correct=bool(correct[index]), random_found=hit)
            # A perturbation that was made as small as it could be, and is larger than the budget all the same.
            beyond = record["outcome"] == "found" and not self.solved(index)
            found.append({**entry, "outcome": "not_adversarial"} if beyond else entry)
        return found


@dataclass(frozen=True, kw_only=True)
class Examined:
    """One attack on the samples, and on planted problems where it was run on some."""

    ran: Ran
    planted: Mapping[str, Any] | None = None  # Numbers of the binarization test
    planted_entries: Sequence[Entry] = ()  # One a problem, as indicators take them
    error: str | None = None  # What it raised on planted problems, or why there are none
    raised: bool = False  # Whether it raised on planted problems, and not on the samples
    padded: Mapping[str, Any] | None = None  # Numbers of the same test with as many classes as the model has
    cut: bool = False  # Whether the time was over before planted problems were done


@dataclass(frozen=True, kw_only=True)
class Examiner:
    """Runs attacks on the samples of a diagnosis; ``outcomes`` and ``planted`` are what it ran, with their costs."""

    given: EvaluationInputs
    settings: DiagnosisSettings
    out: Path | None
    worker: Worker
    outcomes: list[Outcome[ArmRun]] = field(default_factory=list)
    planted: list[Part] = field(default_factory=list)  # Of its binarization tests

    @cached_property
    def correct(self) -> list[bool]:
        """A flag for each sample: classified correctly."""
        return [bool(one) for one in self.given.correct]

    def examine(self, attack: Attack) -> Examined:
        """Run an attack on the samples, and on problems planted in the first of them."""
        ran = self.run(attack.name, attack)
        if ran.error is not None or not self.settings.planted:
            return Examined(ran=ran)
        try:
            result = self._plant(attack)
        except AttackRefusedError:
            raise
        except OutOfTimeError:
            return Examined(ran=ran, error=_OVER, cut=True)
        except AttackError as error:
            return Examined(ran=ran, error=str(error), raised=True, padded=self._padded(attack))
        except (InvalidArgumentError, ModelError) as error:
            # The attack accepts the model: what it refuses is the planted problem, as surrogates of more classes do.
            return Examined(ran=ran, error=str(error))
        self.planted.extend(parts_of(result.content))
        cut = is_over() and len(result.records) < min(self.settings.planted, len(self.given.ids))
        if cut and not result.records:
            return Examined(ran=ran, error=_OVER, cut=True)
        problems, kappa = list[Entry](), result.content["settings"]["kappa"]
        for record in result.records:
            left, reach = record["attacks"].get(attack.name), record["random_reach"]
            if left is not None and left["outcome"] != "not_planted":
                entry = as_entry(left, correct=True, random_found=None if reach is None else reach > kappa)
                problems.append({**entry, "planted": True})
        return Examined(ran=ran, cut=cut, planted=result.attacks[attack.name], planted_entries=problems)

    def run(self, name: str, attack: Attack, *, epsilon: float | None = None) -> Ran:
        """Run an attack on the samples; the threat model's epsilon where none is given.

        Raises:
            OutOfTimeError: The time was over before all samples were attacked.
        """
        if is_over():
            raise OutOfTimeError(f"{name}: {_OVER}")
        given, model = self.given, self.given.threat_model
        epsilon = model.epsilon if epsilon is None else epsilon
        arm = Arm(attack=attack, norm=model.norm, epsilon=epsilon, label=name)
        (run,) = plan_runs([arm], plan_clean(given, batch_size=self.settings.batch_size, seed=self.settings.seed))
        slack = replace(model, epsilon=epsilon).tolerance(given.inputs[0].numel())
        found = Ran(name=name, attack=attack, epsilon=epsilon, slack=slack)
        try:
            outcomes = drive(run_all([run], out=self.out, progress=False, title=name, whole=False), self.worker)
        except AttackRefusedError:
            raise
        except (AttackError, ModelError) as error:
            return replace(found, error=str(error))
        left = outcomes[run.key]
        self.outcomes.append(left)
        return replace(
            found,
            records=left.records,
            curve=next((timing["curve"] for timing in left.timings if timing.get("curve")), ()),
            seconds=left.spent("attack").seconds,
            passes=left.spent("attack").passes,
        )

    def larger(self, ran: Ran) -> Iterator[tuple[str, Ran]]:
        """The same attack with twice the budget and without any, where it follows the budget and is fast enough."""
        model, values = self.given.threat_model, self.given.inputs[0].numel()
        cost = (ran.passes.get("forward", 0) + 2 * ran.passes.get("backward", 0)) / max(len(ran.records), 1)
        if ran.attack.traits.minimum_norm or cost > self.settings.affordable:
            return
        whole = model.width * {"linf": 1.0, "l2": math.sqrt(values), "l1": float(values)}[model.norm]
        for role, epsilon in zip(ROLES, (min(2 * model.epsilon, whole), whole), strict=True):
            yield role, self.run(ran.name, ran.attack, epsilon=epsilon)

    def reference(self, name: str, attack: Attack) -> Ran:
        """An attack to compare with; what it would tell its user is left out."""
        with collecting():
            return self.run(name, attack)

    def references(self, attacks: Iterable[Attack]) -> dict[str, Attack]:
        """Other attacks to compare with; the strongest through the views of these attacks as well."""
        if not self.settings.references:
            return {}
        found: dict[str, Attack] = {
            RANDOM: RandomSearch(points=self.settings.random_points),
            ONE_STEP: APGD(steps=1, start="input"),
            ASCENT: APGD(steps=25, loss="margin"),
            SMOOTHED: AdaptedAttack(attack=APGD(steps=10, loss="margin"), noise=0.5, eot=4),
        }
        if self.given.inputs.dim() == 4:
            found[SQUARE] = Square(queries=self.settings.queries)
        for attack in attacks:
            found |= _through(attack, found[ASCENT])
        return found

    def strongest(self, attack: Attack, known: Mapping[str, Ran]) -> list[Ran]:
        """Run the strongest to compare with, through the view of an attack; those known are not run again."""
        found = self.references([attack])
        names = [*(_through(attack, found[ASCENT]) or [ASCENT]), *([SQUARE] if SQUARE in found else [])]
        return [known[name] if name in known else self.reference(name, found[name]) for name in names]

    def estimates(self, attacks: Sequence[Attack]) -> list[Estimate]:
        """Estimate the cost of attacks on the samples and on planted problems, and that of the references."""
        runs = [*((attack.name, attack) for attack in attacks), *self.references(attacks).items()]
        planted = [estimate(partial(self._plant, attack)) for attack in attacks if self.settings.planted]
        return [*planted, *(estimate(partial(self.run, name, attack)) for name, attack in runs)]

    def _padded(self, attack: Attack) -> Mapping[str, Any] | None:
        """The numbers on planted problems with further classes that nothing is in; None where it raises there too."""
        classes, padded = self.given.logits.shape[1], copy.copy(attack)
        object.__setattr__(padded, "traits", replace(attack.traits, minimum_classes=classes))
        try:
            return self._plant(padded, "padded").attacks[attack.name]
        except AttackRefusedError:
            raise
        except (AttackError, ModelError):
            return None

    def _plant(self, attack: Attack, folder: str = "binarization") -> BinarizationResult:
        given, settings, count = self.given, self.settings, min(self.settings.planted, len(self.given.ids))
        own = hashlib.blake2b(f"{attack.name} {describe(attack)}".encode(), digest_size=5).hexdigest()
        name = re.sub(r"[^A-Za-z0-9.]+", "-", attack.name)[:60].strip("-.")
        return binarization_test(
            given.module,
            [attack],
            given.inputs[:count],
            given.threat_model,
            sample_ids=list(given.ids[:count]),
            out=None if self.out is None else self.out / folder / f"{name}-{own}",
            seed=settings.seed,
            judge_seed=settings.judge_seed,
            inner_points=settings.inner_points,
            # The attack is compared with others on the samples themselves.
            depths=(1,),
            layer=settings.layer,
            readout=settings.readout,
        )


def _through(attack: Attack, ascent: Attack) -> dict[str, Attack]:
    """The strongest reference through the view of an attack; none where it sees the model as it is.

    Other gradients change nothing for references that take none, and draws alone nothing of models that are not random,
    which are all that is run.
    """
    if not isinstance(attack, AdaptedAttack):
        return {}
    view = {name: attack.adaptation[name] for name in _VIEW}
    if {name for name, value in view.items() if value != default_of(AdaptedAttack, name)} <= {"eot"}:
        return {}
    return {f"{ASCENT} through {adaptation_words(**view)}": AdaptedAttack(attack=ascent, **view)}
