"""How long the rest will take: by an estimate at first, and by what blocks took as soon as there are some."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from robust_ext.core.cost import Cost, Rates
from robust_ext.core.speed import measure_rates

if TYPE_CHECKING:
    from robust_ext.engine.run import Run

# Seconds that have to be measured before an estimate is corrected by them, and by how much it may be.
_ENOUGH, _MOST = 1.0, 20.0


@dataclass
class Forecast:
    """The samples of several runs, worked on block by block.

    Args:
        costs: Of one sample of each run, by the run's key.
        samples: How many are left of each.
        rates: Seconds that rows take; None where they were not measured.
    """

    costs: Mapping[str, Cost] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    rates: Rates | None = None
    workers: int = 1  # That share the samples
    rows: tuple[int, int] = (0, 0)  # That went forward and back, in all
    _taken: dict[str, tuple[float, int]] = field(default_factory=dict)  # Seconds and samples of finished blocks
    _block: tuple[str, int, float, Cost] | None = None  # Key, samples, when it began, what was counted since

    @property
    def total(self) -> Cost:
        """Of all samples that are left."""
        return sum((self.costs[key] * count for key, count in self.samples.items()), Cost())

    def __str__(self) -> str:
        """What it takes in all, as far as it is known."""
        cost, (seconds, _) = self.total, self.left()
        parts = []
        if cost.forward:
            back = f" and {cost.backward:,.0f} back" if cost.backward else ""
            minutes = "" if seconds is None else f", about {duration(seconds)}"
            parts.append(f"at most {cost.forward:,.0f} rows forward{back}{minutes}")
        if cost.unknown:
            parts.append(f"what {', '.join(cost.unknown)} takes, which its first block will show")
        return "; and ".join(parts) or "nothing to do"

    def begin(self, key: str, samples: int) -> None:
        """A block of a run begins."""
        self._block = key, samples, time.monotonic(), Cost()

    def count(self, forward: int, backward: int) -> None:
        """So many rows more went forward and back."""
        self.rows = self.rows[0] + forward, self.rows[1] + backward
        if self._block is not None:
            key, samples, begun, counted = self._block
            self._block = key, samples, begun, counted + Cost(forward, backward)

    def end(self, key: str, samples: int) -> None:
        """A block is done, or was done before."""
        if self._block is not None:
            _, _, begun, _ = self._block
            self._block = None
            self.took(key, samples, time.monotonic() - begun)
        elif key in self.samples:
            self.samples[key] = max(0, self.samples[key] - samples)

    def took(self, key: str, samples: int, seconds: float) -> None:
        """A block is done, and took its worker so many seconds."""
        before, count = self._taken.get(key, (0.0, 0))
        self._taken[key] = before + seconds, count + samples
        if key in self.samples:
            self.samples[key] = max(0, self.samples[key] - samples)

    def drop(self, key: str) -> None:
        """Nothing more is done of a run."""
        self.samples[key], self._block = 0, None

    def left(self) -> tuple[float | None, bool]:
        """Seconds to the end, None where nothing is known of them; and whether that is all there is."""
        if self.rates is None and not self._taken:
            return None, False
        waiting = dict(self.samples)
        seconds, known = 0.0, True
        if self._block is not None:
            key, samples, *_ = self._block
            waiting[key] = waiting.get(key, 0) - samples
            seconds, known = self._left_of_block()
        for key, count in waiting.items():
            if count > 0:
                one, all_of_it = self._of_sample(key)
                seconds, known = seconds + one * count, known and all_of_it
        return seconds / self.workers, known

    def _of_sample(self, key: str) -> tuple[float, bool]:
        """Seconds of a sample, and whether that is all of it."""
        if key in self._taken:
            seconds, count = self._taken[key]
            return seconds / count, True
        return self._estimate(key) * self._correction, not self.costs[key].unknown and self.rates is not None

    def _left_of_block(self) -> tuple[float, bool]:
        assert self._block is not None
        key, samples, begun, counted = self._block
        gone = time.monotonic() - begun
        if key in self._taken:
            return max(0.0, self._of_sample(key)[0] * samples - gone), True
        done = 0.0 if self.rates is None else self.rates.seconds(counted)
        speed = _within(gone / done) if done and gone > _ENOUGH else self._correction
        return max(0.0, self._estimate(key) * samples - done) * speed, not self.costs[key].unknown

    def _estimate(self, key: str) -> float:
        return 0.0 if self.rates is None else self.rates.seconds(self.costs[key])

    @property
    def _correction(self) -> float:
        """What finished blocks took, over what they were estimated to take."""
        taken = sum(seconds for seconds, _ in self._taken.values())
        estimated = sum(self._estimate(key) * count for key, (_, count) in self._taken.items())
        return _within(taken / estimated) if estimated and taken > _ENOUGH else 1.0


def make_forecast(runs: Sequence[Run]) -> Forecast:
    """The forecast of runs of one evaluation, its rates measured with the first network that one of them names."""
    made = Forecast({run.key: run.cost() for run in runs}, {run.key: sum(map(len, run.blocks)) for run in runs})
    network = next((probe for run in runs if (probe := run.probe()) is not None), None)
    if network is not None:
        made.rates = measure_rates(network, made.total)
    return made


def _within(factor: float) -> float:
    return min(_MOST, max(1 / _MOST, factor))


def duration(seconds: float) -> str:
    """Seconds in words.

    Example:
        >>> [duration(seconds) for seconds in (0.4, 75, 600, 7300)]
        ['0 s', '1 min 15 s', '10 min', '2 h 2 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
