"""Conclusions about rates from counts of solved problems.

A pass claims two rates: the attack solves more than ``proven_rate`` of such problems, random search at most
``maximum_random_score``. Each claim is tested on its own, and is wrong with probability at most ``error_rate``:

- With a fixed number of samples by exact binomial bounds (Clopper and Pearson 1934).
- With ``sequential`` by likelihood ratios that may be looked at after every sample
  (:func:`robust_ext.core.statistics.sequential_decision`). Exact bounds at a sample that the results chose would be
  wrong more often than they state.

The verdict on several attacks is that of the best, and one of them passes by chance more easily than each: the error of
an attack's rate is divided by their number (Bonferroni), so that *any* of the attacks with a rate of ``proven_rate`` or
less passes with probability at most ``error_rate``. R-ASR is one number for all of them; its error is divided among the
``depths``, since any at which it is low enough may decide: half is of the planted points, where nearly every verdict is
taken, the rest of all others. Rates at several depths need no correction: an attack passes at one only where its rate
was shown at all before, so that one whose rate is too low from some depth on has to get through the test there. Nor
does a pair of tests with a detector: a pass needs both.

Random search has its own number of samples: it ends once they settle R-ASR (``random_stops``). With a fixed number of
samples there are two looks, after 8 and 16 planted problems. Each takes a sixth of the error, which at the defaults is
what 0 of 8 need; the bound of all samples has the other two thirds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from robust_ext.core.errors import warn
from robust_ext.core.statistics import lower_bound, more_often, sequential_decision, upper_bound
from robust_ext.core.wording import count
from robust_ext.evaluations.binarization.settings import BinarizationSettings

# The share of deeper problems, proved by others, below which an attack falls behind. It is not the threshold of planted
# problems: those are drawn at random, these are what the best of all witnesses found.
_BEHIND = 0.5
# The share below which an attack that passes falls behind; its verdict stays.
_TRAILS = 0.75
# This many samples show how deep an attack goes, where the sequential rule needs no more of that.
_GRADED = 16
LOOKS = (8, 16)
"""Numbers of planted problems that may settle R-ASR where the number of samples is fixed."""
_LOOK = 1 / 6  # Of the error of R-ASR, at each of them.
# Numbers of samples above it are not advised.
_MOST = 5000


@dataclass(frozen=True, kw_only=True)
class Solved:
    """Problems at one depth, and how many of them were solved."""

    found: int
    random_found: int
    samples: int
    depth: float = 1.0
    non_finite: int = 0  # Others in which the attack came to points at which the network's logits are not finite.
    random_samples: int | None = None  # How many of them random search was tried on; None for all.

    @classmethod
    def of(cls, problems: Iterable[tuple[str, float | None]], position: float, **more: Any) -> Solved:
        """Count problems by the outcome and by the reach of random search, if any, with the boundary at a position."""
        outcomes = list(problems)
        random = [reach > position for _, reach in outcomes if reach is not None]
        return cls(
            found=sum(outcome == "found" for outcome, _ in outcomes),
            random_found=sum(random),
            samples=len(outcomes),
            random_samples=len(random),
            **more,
        )

    @property
    def searched(self) -> int:
        """The number of problems behind ``random_found``."""
        return self.samples if self.random_samples is None else self.random_samples

    @property
    def random_score(self) -> float:
        """R-ASR; 0 where random search was tried on none."""
        return self.random_found / max(self.searched, 1)


@dataclass(frozen=True)
class Rules:
    """The rules of one attack, where ``attacks`` attacks are tried in the run."""

    settings: BinarizationSettings
    attacks: int = 1

    @property
    def error_rate(self) -> float:
        """The error rate of claims about one attack's rate."""
        return self.settings.error_rate / self.attacks

    def random_error_rate(self, depth: float = 1.0) -> float:
        """Return the error rate of claims about R-ASR at one depth."""
        whole, deeper = self.settings.error_rate, len(self.settings.depths) - 1
        if not deeper:
            return whole
        return whole / 2 if depth == 1 else whole / 2 / deeper

    def decide(self, depths: Sequence[Solved]) -> tuple[str, Solved]:
        """Return the verdict on solved planted and deeper problems, and the depth at which it is taken.

        Rules 3 to 6 of :mod:`robust_ext.evaluations.binarization.verdict`.
        """
        first = last = depths[0]
        if self.fails(first.found, first.samples):
            # Where the network breaks down, the attack may not be to blame.
            surely = self.fails(first.found + first.non_finite, first.samples)
            return "failed" if surely else "inconclusive", first
        easy = True  # Whether random search finds too much at all depths so far.
        for at in (first, *(deeper for deeper in depths[1:] if deeper.samples)):
            if at is not first and easy and self.falls_behind(at.found, at.samples):
                return "failed", at
            proved, hard = self.proves_rate(at.found, at.samples), self.proves_hard(at)
            last = at
            if proved and hard and at.depth >= self.settings.least_depth:
                return "passed", at
            if not proved:
                break
            easy &= not hard
        return "inconclusive", last

    def fails(self, found: int, samples: int) -> bool:
        """Return whether the score is below the threshold, by two misses or more: a single one may be chance."""
        return samples - found >= 2 and found / samples < self.settings.threshold

    def falls_behind(self, found: int, samples: int) -> bool:
        """Return whether the attack surely solves less than half of the problems that others prove at some depth."""
        return self._below(found, samples, _BEHIND)

    def trails(self, found: int, samples: int) -> bool:
        """Return whether the attack surely solves less than three quarters of what others prove at a depth."""
        return self._below(found, samples, _TRAILS)

    def _below(self, found: int, samples: int, rate: float) -> bool:
        error_rate = self.error_rate / len(self.settings.depths)
        if self.settings.sequential:
            return sequential_decision(found, samples, threshold=rate, error_rate=error_rate) == "below"
        return upper_bound(found, samples, error_rate=error_rate) < rate

    def stops_at_head(self, behind: Solved, *, masked: bool) -> bool:
        """Return whether an attack with gradients fails by its solved problems at the logits.

        Where the head masks gradients it has to solve them; elsewhere it is shown to solve less than half.
        """
        if not masked:
            return behind.samples > 0 and self.falls_behind(behind.found, behind.samples)
        solved = lower_bound(behind.found, behind.samples, error_rate=self.error_rate) > _BEHIND
        return not solved or behind.random_score > _BEHIND or self.fails(behind.found, behind.samples)

    def outdone(self, deeper: int, shallower: int) -> bool:
        """Return whether another attack goes deeper in more samples than this one: a paired sign test."""
        if self.settings.sequential:
            pairs = deeper + shallower
            return sequential_decision(deeper, pairs, threshold=0.5, error_rate=self.error_rate) == "above"
        return more_often(deeper, shallower, error_rate=self.error_rate)

    def proves_rate(self, found: int, samples: int) -> bool:
        """Return whether the score reaches the threshold and shows a rate above ``proven_rate``; no rate if that is 0.

        With the sequential rule and a ``proven_rate`` of 0, it shows one above the threshold.
        """
        chosen = self.settings
        if not samples or found / samples < chosen.threshold:
            return False
        if chosen.sequential:
            rate = chosen.proven_rate or chosen.threshold
            return sequential_decision(found, samples, threshold=rate, error_rate=self.error_rate) == "above"
        return self.at_least(found, samples) > chosen.proven_rate or not chosen.proven_rate

    def proves_hard(self, at: Solved) -> bool:
        """Return whether R-ASR is shown to be at most ``maximum_random_score``; where that is 1, all is hard enough."""
        chosen = self.settings
        if chosen.maximum_random_score == 1:
            return True
        if chosen.sequential:
            return self._random_decision(at) == "below"
        return self.at_most(at) <= chosen.maximum_random_score

    def at_least(self, found: int, samples: int) -> float:
        """The lower bound of the attack's rate, for a number of samples that was fixed before."""
        return lower_bound(found, samples, error_rate=self.error_rate)

    def at_most(self, at: Solved) -> float:
        """The upper bound of R-ASR, likewise, or at the look that ended random search."""
        return self._at_most(at, look=at.searched < at.samples)

    def _at_most(self, at: Solved, *, look: bool) -> float:
        looks = self._may_settle and at.depth == 1
        share = 1.0 if not looks else _LOOK if look else 1 - len(LOOKS) * _LOOK
        return upper_bound(at.random_found, at.searched, error_rate=share * self.random_error_rate(at.depth))

    def decided(self, first: Solved) -> bool:
        """The sequential rule: whether no more samples are needed.

        They are not where the rate is shown to be below the threshold, or to be above ``proven_rate`` when R-ASR is
        shown to lie on either side of its maximum as well.
        """
        found, samples, bar = first.found, first.samples, self.settings.threshold
        if sequential_decision(found, samples, threshold=bar, error_rate=self.error_rate) == "below":
            return True
        return self.proves_rate(found, samples) and (
            self.proves_hard(first) or self._random_decision(first) is not None
        )

    def random_settled(self, first: Solved) -> bool:
        """Return whether the planted problems so far settle R-ASR, so that no search is needed for more.

        They do where they show it to be at most the maximum, if an attack may pass there; and with the sequential rule
        where they show it to be above, if there are no deeper problems, of which it would be needed.
        """
        chosen = self.settings
        if not self._may_settle:
            return False
        if not chosen.sequential:
            return self._at_most(first, look=True) <= chosen.maximum_random_score
        decision = self._random_decision(first)
        return decision == "below" or (decision == "above" and len(chosen.depths) == 1)

    @property
    def _may_settle(self) -> bool:
        chosen = self.settings
        return chosen.random_stops and chosen.maximum_random_score < 1 and chosen.least_depth <= 1

    def graded(self, samples: int) -> bool:
        """The sequential rule: whether that many samples are enough to grade attacks by their depth."""
        return self.settings.sequential and samples >= _GRADED

    def warn_if_few(self, samples: int) -> None:
        """Warn at once, before any work, where no attack can pass on so few samples."""
        needed = self.needed(Solved(found=0, random_found=0, samples=0))
        if samples < (needed or 0):
            warn(
                f"No attack can pass the binarization test on {count(samples, 'sample')}: one that misses none needs "
                f"{needed}",
                kept=False,
                at_once=True,
            )

    def needed(self, at: Solved) -> int | None:
        """The fewest samples that pass where the attack misses no more and R-ASR stays; None where too many."""
        missed = at.samples - at.found
        for number in range(max(at.samples, 1), _MOST + 1):
            # R-ASR is rounded up to whole problems.
            random = ceil(at.random_found * number / max(at.searched, 1))
            more = Solved(found=number - missed, random_found=random, samples=number, depth=at.depth)
            if self.proves_rate(more.found, number) and self.proves_hard(more):
                return number
        return None

    def _random_decision(self, at: Solved) -> str | None:
        limit, error_rate = self.settings.maximum_random_score, self.random_error_rate(at.depth)
        return sequential_decision(at.random_found, at.searched, threshold=limit, error_rate=error_rate)
