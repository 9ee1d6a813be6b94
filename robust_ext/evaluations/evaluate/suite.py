"""The standard suite of attacks: which run, in which order and at which budgets.

Beside AutoAttack, on small networks in linf and l2, the standard budget leaves as many samples standing or fewer, at a
fifth of the passes. Runs that begin at the nearest adversarial points of the search break samples that cold runs do
not, and in l2 the search itself begins at noise, far from the inputs: gradients may vanish there. The table and its
misses are in docs/evidence/suite.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack
from robust_ext.attacks.linear_region.boundary import BoundarySearch
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.attacks.rays import RayS
from robust_ext.attacks.square import Square
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_choice

BUDGETS = ("quick", "standard", "thorough")


@dataclass(frozen=True, kw_only=True)
class Member:
    """An attack of the suite, run on the samples that those before it left.

    Args:
        attack: The attack, under the name that tables show.
        white_box: Whether it follows gradients of the target, so that a certificate can be asked for it.
        warm: Whether it begins at a point found before: the nearest adversarial point of each sample, even outside the
            ball, and where there is none the point of highest margin in it, given as ``Target.starting_points``
            ``(N, 1, ...)``.
    """

    attack: Attack
    white_box: bool
    warm: bool = False


@dataclass(frozen=True, kw_only=True)
class _Budget:
    """Steps of the first run, the search and that in l2, and steps and classes of warm and of cold targeted runs."""

    first: int
    search: BoundarySearch
    search_l2: BoundarySearch
    warm: tuple[int, int]
    cold: tuple[int, int]
    queries: int


# No hops but in long searches: more starts find more in the same passes.
_from_noise = partial(BoundarySearch, starts=("descent", "noise"), target_classes=0)
_BUDGETS = {
    "quick": _Budget(
        first=20,
        search=BoundarySearch(budget=150),
        search_l2=_from_noise(budget=160, draws=2, start_steps=30, hops=0),
        warm=(20, 2),
        cold=(20, 3),
        queries=50,
    ),
    "standard": _Budget(
        first=30,
        search=BoundarySearch(budget=550),
        search_l2=_from_noise(budget=600, draws=6, hops=0),
        warm=(60, 3),
        cold=(60, 5),
        queries=150,
    ),
    "thorough": _Budget(
        first=100,
        search=BoundarySearch(budget=3000),
        search_l2=_from_noise(budget=3000, draws=12),
        warm=(100, 9),
        cold=(100, 9),
        queries=3000,
    ),
}


def _without_gradients(threat_model: ThreatModel, queries: int, *, square: bool) -> list[Member]:
    """Return members by scores, and in linf by labels; random search takes Square's place where that cannot run."""
    first = Square(queries=queries) if square else RandomSearch(points=queries)
    found = [Member(attack=first, white_box=False)]
    if threat_model.norm == "linf":
        found.append(Member(attack=RayS(queries=queries), white_box=False))
    return found


def standard_suite(
    threat_model: ThreatModel, *, budget: str, classes: int, square: bool, blind: bool = False
) -> list[Member]:
    """Return the members in the order in which they run.

    A sample that stands to the end takes about 460 passes forward and back with ``"quick"``, 1,750 with ``"standard"``
    and 9,800 with ``"thorough"``, which is what AutoAttack takes.

    Args:
        threat_model: What candidates are judged by.
        budget: ``"quick"``, ``"standard"`` or ``"thorough"``.
        classes: Number of the target's classes.
        square: Whether Square can run: inputs are images ``(N, C, H, W)``, series ``(N, C, L)`` or vectors ``(N, D)``.
        blind: Whether the target is a black box: members need no gradients, and have ten times the queries.

    Raises:
        InvalidArgumentError: There is no such budget.
    """
    given = _BUDGETS[check_choice("budget", budget, BUDGETS)]
    if blind:
        return _without_gradients(threat_model, 10 * given.queries, square=square)

    def aimed(steps: int, aims: int, *, warm: bool) -> APGD:
        aims = min(aims, classes - 1)
        return APGD(steps=steps, loss="targeted-margin", target_classes=aims, warm=warm, stop_early=True)

    members = [
        Member(attack=APGD(steps=given.first, stop_early=True), white_box=True),
        Member(attack=given.search_l2 if threat_model.norm == "l2" else given.search, white_box=True),
        Member(attack=aimed(*given.warm, warm=True).named("APGD-T-warm"), white_box=True, warm=True),
        Member(attack=aimed(*given.cold, warm=False).named("APGD-T"), white_box=True),
    ]
    if square:
        members.append(Member(attack=Square(queries=given.queries), white_box=False, warm=True))
    return members
