"""Evidence of one attack on each sample, for the rules that find its faults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from robust_ext.attacks.base import Attack
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import BROKEN, LOST
from robust_ext.evaluations.causes.finding import Finding, Remedy
from robust_ext.evaluations.causes.probes import ModelProbe

Entry = Mapping[str, Any]
"""What an attack left of a sample: ``outcome`` (:data:`robust_ext.engine.verify.OUTCOMES`), ``distance`` in units of
the norm or None, ``trace`` (:mod:`robust_ext.engine.trace`) or None, ``correct`` (whether the clean prediction is
right, or None), ``canary`` (``"kept"``, ``"repaired"`` or None), ``random_found`` (whether random search solved it),
``planted`` (whether an adversarial example is known to be there; may be missing)."""

# A fault must show in this many samples: at least two, a tenth of those that the attack did not solve, and a twentieth
# of all, which is the score below which a binarization test fails.
FEWEST, OF_UNSOLVED, OF_ALL = 2, 0.1, 0.05
# Half: an attack whose gradients are zero at fewer points gets away from them.
MOSTLY = 0.5


@dataclass(frozen=True)
class Sample:
    """One sample that an attack was run on; distances are in epsilons."""

    entry: Entry
    outcome: str
    distance: float | None
    trace: Mapping[str, Any]

    def known(self, key: str) -> float | None:
        """Return a value of the trace; None where it is not known."""
        value = self.trace.get(key)
        return None if value is None else float(value)

    def count(self, key: str) -> float:
        """Return a value of the trace; 0 where it is not known."""
        return self.known(key) or 0.0

    @property
    def right(self) -> bool:
        """True unless the clean prediction is wrong."""
        return self.entry.get("correct") is not False

    @property
    def far(self) -> float:
        """The largest distance from the input, of its queries and its candidate."""
        return max(self.count("reach"), self.distance or 0.0)

    @property
    def travel(self) -> float | None:
        """The length of all steps together; None where steps are not known, or did not move."""
        step = self.known("step")
        return None if not step else step * self.count("gradients")

    @property
    def scale(self) -> float:
        """Unit of margins: the largest logit met, as a magnitude."""
        return self.count("scale") or 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attack with what it left; ``probe`` is what is known of the model."""

    name: str
    attack: Attack
    entries: Sequence[Entry]
    threat_model: ThreatModel
    probe: ModelProbe | None = None

    @cached_property
    def samples(self) -> list[Sample]:
        """All samples that were attacked."""
        return [
            Sample(
                one,
                str(one["outcome"]),
                None if one.get("distance") is None else float(one["distance"]) / self.threat_model.epsilon,
                one.get("trace") or {},
            )
            for one in self.entries
            if one["outcome"] not in LOST
        ]

    @cached_property
    def unsolved(self) -> list[Sample]:
        """The samples classified right and not solved: the only ones that show an attack's faults."""
        return [one for one in self.samples if one.outcome not in BROKEN and one.right]

    @cached_property
    def succeeds(self) -> bool:
        """True if it found the planted points, but for a twentieth; half of all samples where nothing was planted."""
        planted = [one for one in self.samples if one.entry.get("planted")]
        known = planted or [one for one in self.samples if one.right]
        missed = sum(one.outcome not in BROKEN for one in known)
        return len(known) >= FEWEST and missed <= (OF_ALL if planted else 1 / 2) * len(known)

    @property
    def minimum_norm(self) -> bool:
        """True if it looks for the smallest perturbation: it is then not held to the ball on its way."""
        return self.attack.traits.minimum_norm

    @cached_property
    def black_box(self) -> bool:
        """True if no gradient was wanted."""
        if not any(one.trace for one in self.samples):
            return not self.attack.traits.gradients
        return not any(one.count("graphs") or one.count("gradients") for one in self.samples)

    def showing(self, shows: Callable[[Sample], bool]) -> list[Sample]:
        """Return the traced unsolved samples that show something; none where they are too few to be evidence."""
        rows = [one for one in self.unsolved if one.trace and shows(one)]
        return rows if self.enough(rows) else []

    def stepping(self, shows: Callable[[Sample], bool]) -> list[Sample]:
        """Return those of an attack that follows gradients within the ball; none where fewer than half show it."""
        rows = [] if self.minimum_norm or self.black_box else self.showing(shows)
        return rows if len(rows) >= MOSTLY * len(self.unsolved) else []

    def enough(self, rows: Sequence[object]) -> bool:
        """Return whether that many samples are evidence."""
        return len(rows) >= max(FEWEST, OF_UNSOLVED * len(self.unsolved), OF_ALL * len(self.samples))

    def part(self, rows: Sequence[object]) -> str:
        """Describe these samples as a part of the unsolved ones."""
        return f"{len(rows)} of {len(self.unsolved)} unsolved {self.unit}"

    @property
    def unit(self) -> str:
        """The unit of the count: labelled samples, and in a diagnosis planted problems too."""
        kinds = {bool(one.entry.get("planted")) for one in self.unsolved}
        return "samples and planted problems" if len(kinds) > 1 else "samples"

    @property
    def most_steps(self) -> int:
        """The most steps of any sample: where others took fewer, it ends by itself."""
        return round(max((one.count("gradients") for one in self.samples), default=0.0))

    def finding(
        self,
        code: str,
        cause: str,
        rows: Sequence[object],
        *evidence: str,
        remedies: Iterable[Remedy] = (),
        layer: str | None = None,
    ) -> Finding:
        """Make a finding that this many of the unsolved samples show."""
        return Finding(
            code=code,
            cause=cause,
            evidence=evidence,
            attack=self.name,
            samples=len(rows),
            of=max(len(self.unsolved), len(rows)),
            unit=self.unit,
            layer=layer,
            remedies=tuple(remedies),
        )


def typical(rows: Iterable[Sample], read: str | Callable[[Sample], float | None]) -> float:
    """Return the median of what is known of it, by its name in the trace or a function; 0 where nothing is."""
    found = (one.known(read) if isinstance(read, str) else read(one) for one in rows)
    values = [value for value in found if value is not None]
    return median(values) if values else 0.0


def number(value: float) -> str:
    """Return a number as text: three digits."""
    return f"{value:.3g}"
