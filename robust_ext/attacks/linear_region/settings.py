"""Settings of the linear-region attack, and the race between starts that follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.validation import check_choice, check_integer, check_number

STARTS = ("noise", "nearest", "given")
CLASSES = ("runner-up", "all")
# Length and steps of hops, by trial on images of digits.
HOPS = {"linf": (0.1, 30), "l2": (1.5, 12), "l1": (1.5, 12)}


@dataclass(frozen=True, kw_only=True)
class LinearRegionSettings:
    """Settings of the attack.

    Args:
        starts: Starts of each input that are searched for, at least 1.
        start: ``"noise"``: adversarial noise, blended with the input. ``"nearest"``: the nearest images of the
            likeliest other classes, which have to be given. ``"given"``: only starting points that are given.
        walk: Steps of the walk along the decision boundary that comes first, see
            :func:`robust_ext.attacks.linear_region.walk.walk`; 0 for none.
        survivors: Starts that go on after the walk, at least 1; all do when there are no walk and no hops.
        hops: Random jumps of each survivor before the first region, each with a short walk back; 0 for none.
        hop_length: Of a jump, as a multiple of the perturbation's l2 norm, above 0; .1 in linf and 1.5 in l2 and l1
            when left out.
        hop_steps: Steps of the walk back, at least 1; 30 in linf and 12 in l2 and l1 when left out.
        regions: Regions that are sampled for each input, over all its starts; 0 for the walk alone.
        halving: Rounds after which the worse half of the starts is given up, at least 1.
        q: Probability that a region is sampled on the side of the input, in [.5, 1] (paper: .8).
        gamma: How close to the best point regions are sampled, above 0: the larger, the closer (paper: 6).
        classes: ``"runner-up"``: one problem for each region, for the strongest class at the sampled point. ``"all"``:
            one for each class (the paper's). Makes no difference to a targeted attack.
        improvement: Share by which a region has to beat the best point to be solved to the end: in the first round, and
            in the last; it falls geometrically. Both in (0, 1).
        iterations: Most iterations of the solver for one region.
        passes: Rows sent forward and backward after which an input gets no further round; no limit when left out.
        seconds: Wall-clock time after which no further step is made; no limit when left out. Results then depend on
            the speed of the machine and on the rest of the batch.
        batch: Most points handled at once.
    """

    starts: int = 12
    start: str = "noise"
    walk: int = 30
    survivors: int = 4
    hops: int = 24
    hop_length: float | None = None
    hop_steps: int | None = None
    regions: int = 40
    halving: int = 3
    q: float = 0.8
    gamma: float = 6.0
    classes: str = "runner-up"
    improvement: tuple[float, float] = (0.02, 0.001)
    iterations: int = 100
    passes: int | None = None
    seconds: float | None = None
    batch: int = 128

    def __post_init__(self) -> None:
        least = {"starts": 1, "walk": 0, "survivors": 1, "hops": 0, "regions": 0}
        least |= {"halving": 1, "iterations": 1, "batch": 1}
        for name, minimum in least.items():
            object.__setattr__(self, name, check_integer(name, getattr(self, name), minimum=minimum))
        check_choice("start", self.start, STARTS)
        check_choice("classes", self.classes, CLASSES)
        object.__setattr__(self, "q", check_number("q", self.q, minimum=0.5, maximum=1))
        object.__setattr__(self, "gamma", check_number("gamma", self.gamma, minimum=0, open_minimum=True))
        if self.hop_length is not None:
            length = check_number("hop_length", self.hop_length, minimum=0, open_minimum=True)
            object.__setattr__(self, "hop_length", length)
        if self.hop_steps is not None:
            object.__setattr__(self, "hop_steps", check_integer("hop_steps", self.hop_steps, minimum=1))
        if not isinstance(self.improvement, (tuple, list)) or len(self.improvement) != 2:
            raise InvalidArgumentError("improvement", self.improvement, "a pair (first round, last round)")
        pair = [check_number("improvement", v, minimum=0, maximum=0.999, open_minimum=True) for v in self.improvement]
        object.__setattr__(self, "improvement", tuple(pair))
        if self.passes is not None:
            object.__setattr__(self, "passes", check_integer("passes", self.passes, minimum=1))
        if self.seconds is not None:
            seconds = check_number("seconds", self.seconds, minimum=0, open_minimum=True)
            object.__setattr__(self, "seconds", seconds)

    def hop(self, norm: str) -> tuple[float, int]:
        """Length and steps of a hop in a norm."""
        length, steps = HOPS[norm]
        return self.hop_length or length, self.hop_steps or steps

    def race(self, starts: int) -> list[tuple[int, int]]:
        """How many starts of an input take part in each round, and how many regions each of them samples.

        As starts are given up, the others sample more, so that there is as much to compute at once.

        Args:
            starts: How many there are at first.
        """
        first = min(starts, self.survivors) if self.walk or self.hops else starts
        rounds: list[tuple[int, int]] = []
        left = self.regions if starts else 0
        while left > 0:
            alive = min(left, max(1, first >> (len(rounds) // self.halving)))
            draws = min(left, first) // alive
            rounds.append((alive, draws))
            left -= alive * draws
        return rounds

    def demanded(self, number: int, total: int) -> float:
        """The improvement that is demanded in a round, from 0, of ``total`` rounds."""
        first, last = self.improvement
        return float(first * (last / first) ** (number / max(1, total - 1)))
