"""The linear-region attack: the nearest adversarial point, searched for one linear region after another.

Source: Croce, Rauber and Hein, "Scaling up the randomized gradient-free adversarial attack reveals overestimation of
robustness using established attacks" (2019), algorithm 1 and section 4. Beyond the paper: starts of noise that race
against one another, a cheap walk and hops before the first region, and the norms linf and l1.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor

from robust_ext.attacks.base import AttackTraits, draw_seed
from robust_ext.attacks.linear_region.history import LinearRegionResult
from robust_ext.attacks.linear_region.judge import Judge
from robust_ext.attacks.linear_region.progress import Run
from robust_ext.attacks.linear_region.network.recording import record
from robust_ext.attacks.linear_region.runners import Runners
from robust_ext.attacks.linear_region.sampling import jump
from robust_ext.attacks.linear_region.search import RegionSearch
from robust_ext.attacks.linear_region.settings import LinearRegionSettings
from robust_ext.attacks.linear_region.starts import adversarial_starts, nearest_starts, noise_starts
from robust_ext.attacks.linear_region.walk import walk
from robust_ext.attacks.native import NativeAttack, Watch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.random import stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.core.validation import check_inputs, check_labels

_DEFAULTS = LinearRegionSettings()
# After a walk: the share of the perturbation that is kept when it is drawn in, and how much farther than before the
# walk may have ended for that to be tried.
_LEAST, _WORTH = 0.9, 1.01


def linear_region(
    target: Target,
    inputs: Tensor,
    labels: Tensor,
    *,
    threat_model: ThreatModel,
    generator: torch.Generator,
    settings: LinearRegionSettings = _DEFAULTS,
    starting_points: Tensor | None = None,
    pool: Tensor | None = None,
    targeted: bool = False,
    watch: Watch | None = None,
) -> LinearRegionResult:
    """Search for the smallest adversarial perturbation of each input.

    The smallest that was found at any time is kept, and the true network has confirmed each. A row's result depends on
    the others by rounding alone, unless there is a limit in seconds; the solver can make per cents of it in l1, and
    other points of nearly the same distance in linf.

    Args:
        target: A piecewise affine network in eval mode, see
            :func:`robust_ext.attacks.linear_region.recording.record`.
        inputs: Floating point ``(N, ...)`` in the target's bounds, taken as float32; not changed.
        labels: int64 ``(N,)``: the true classes, or the classes to aim at.
        threat_model: Gives the norm; epsilon has no influence.
        generator: CPU generator; each row draws one seed from it, in order, and everything else from that seed.
        settings: See :class:`LinearRegionSettings`.
        starting_points: Points to begin at besides those searched for, such as the candidates of other attacks,
            ``(N, S, ...)`` in bounds; no result is farther than the nearest of them that is adversarial.
        pool: Images for ``start="nearest"``, ``(P, ...)`` in bounds.
        targeted: Whether rows should be classified as their label instead of as anything else.
        watch: Called after each hop and round, see :class:`robust_ext.attacks.native.Step`: with the nearest points
            found so far (the input where there is none) and minus their distances.

    Returns:
        Candidates, distances and history. An input that is adversarial as it is comes back with distance 0.

    Raises:
        InvalidArgumentError: Arguments are not as described, or do not fit the settings' ``start``.
        ModelError: The network is not piecewise affine, or cannot be followed.
        AttackError: The target gives no gradients.
    """
    inputs = check_inputs("inputs", inputs, bounds=target.bounds)
    labels = check_labels("labels", labels, samples=len(inputs), classes=target.classes).to(inputs.device)
    starting_points, pool = _checked(settings, target, inputs, starting_points, pool)
    seeds = [draw_seed(generator) for _ in range(len(inputs))]
    judge = Judge(target, inputs, labels, threat_model=threat_model, targeted=targeted)
    run = Run(judge, settings, watch)
    if len(inputs) == 0:
        return run.result()
    solved = judge.solved()
    run.distance[solved] = 0
    # Recording counts its own pass, as any query of the module.
    search = RegionSearch(judge, record(target.module, inputs[:1]), settings)
    run.regions = search.regions
    runners = _starts(judge, seeds, settings, starting_points, pool, wanted=run.open())
    race = settings.race(len(runners.streams) // len(inputs))
    run.moment(runners)
    if settings.walk:
        runners = _walked(judge, runners, settings, run)
        run.moment(runners)
    runners = runners.select(torch.isfinite(runners.distances).nonzero().flatten())
    total = settings.hops + len(race)
    for number in range(total):
        turn = number - settings.hops
        alive, draws = (settings.survivors, 1) if turn < 0 else race[turn]
        runners = runners.ranked(alive, run.open())
        if len(runners.streams) == 0 or not run.running():
            break
        if turn < 0:
            runners = _hopped(judge, runners, settings, run)
        else:
            improvement = settings.demanded(turn, len(race))
            runners = search.round(runners, draws=draws, number=turn, improvement=improvement)
        run.moment(runners, number=number, total=total)
    return run.result()


def _checked(
    settings: LinearRegionSettings, target: Target, inputs: Tensor, starting_points: Tensor | None, pool: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    if starting_points is not None:
        shape = tuple(starting_points.shape)
        if shape[:1] != (len(inputs),) or shape[2:] != tuple(inputs.shape[1:]):
            expected = f"shape ({len(inputs)}, S, {', '.join(map(str, inputs.shape[1:]))})"
            raise InvalidArgumentError("starting_points", f"shape {shape}", expected)
        flat = check_inputs("starting_points", starting_points.flatten(0, 1), bounds=target.bounds)
        starting_points = flat.to(inputs.device).view(shape)
    elif settings.start == "given":
        raise InvalidArgumentError("starting_points", None, "points for start='given'; or choose start='noise'")
    if settings.start == "nearest":
        if pool is None or len(pool) == 0:
            raise InvalidArgumentError("pool", "no images", "images for start='nearest'; or choose start='noise'")
        pool = check_inputs("pool", pool, bounds=target.bounds).to(inputs.device)
        if pool.shape[1:] != inputs.shape[1:]:
            raise InvalidArgumentError("pool", f"shape {tuple(pool.shape)}", f"images like {tuple(inputs.shape[1:])}")
    return starting_points, pool


def _starts(
    judge: Judge,
    seeds: list[int],
    settings: LinearRegionSettings,
    given: Tensor | None,
    pool: Tensor | None,
    *,
    wanted: Tensor,
) -> Runners:
    """The starts, input by input, as many for each; those that are not adversarial are infinitely far."""
    count, inputs = len(seeds), judge.inputs
    parts: list[tuple[Tensor, Tensor]] = []
    if given is not None:
        owners = _owners(inputs, given.shape[1])
        parts.append(adversarial_starts(judge, given.flatten(0, 1), owners))
    if settings.start == "nearest" and pool is not None:
        parts.append(nearest_starts(judge, pool, count=settings.starts, batch=settings.batch))
    if settings.start == "noise":
        owners = _owners(inputs, settings.starts)
        points, found = inputs[owners], torch.zeros(len(owners), dtype=torch.bool, device=inputs.device)
        for rows in torch.split(wanted[owners].nonzero().flatten(), settings.batch):
            pairs = [(seeds[row // settings.starts], row % settings.starts) for row in rows.tolist()]
            streams = [stream(seed, number, "start") for seed, number in pairs]
            points[rows], found[rows] = noise_starts(judge, owners[rows], streams)
        parts.append((points, found))
    points = torch.cat([points.view(count, -1, *inputs.shape[1:]) for points, _ in parts], 1)
    found = torch.cat([found.view(count, -1) for _, found in parts], 1).flatten()
    owners, points = _owners(inputs, points.shape[1]), points.flatten(0, 1)
    distances = torch.where(found, judge.distances(points, owners), torch.inf)
    streams = [stream(seed, number, "regions") for seed in seeds for number in range(len(owners) // count)]
    return Runners(owners, points, distances, streams)


def _walked(judge: Judge, runners: Runners, settings: LinearRegionSettings, run: Run) -> Runners:
    """The starts after the walk: at the nearest point they came by, or where they began."""
    return _nearer(judge, runners, runners.points, run, steps=settings.walk, batch=settings.batch)


def _hopped(judge: Judge, runners: Runners, settings: LinearRegionSettings, run: Run) -> Runners:
    """The starts after a random jump and a short walk back, or where they were."""
    inputs, bounds = judge.inputs[runners.owners], judge.threat_model.bounds
    length, steps = settings.hop(judge.threat_model.norm)
    away = jump(runners.points, inputs, runners.streams, length=length, bounds=bounds)
    return _nearer(judge, runners, away, run, steps=steps, batch=settings.batch)


def _nearer(judge: Judge, runners: Runners, away: Tensor, run: Run, *, steps: int, batch: int) -> Runners:
    """Walk from points ``away``, and take over what is nearer than before."""
    points, distances = runners.points.clone(), runners.distances.clone()
    for rows in torch.split(run.open()[runners.owners].nonzero().flatten(), batch):
        walked, reached = walk(judge, away[rows], runners.owners[rows], steps=steps, running=run.running)
        good = torch.isfinite(reached) & (reached < distances[rows] * _WORTH)
        rows, walked = rows[good], walked[good]
        drawn = judge.drawn_in(walked, runners.owners[rows], least=_LEAST)
        lengths = judge.distances(drawn, runners.owners[rows])
        nearer = lengths < distances[rows]
        points[rows[nearer]], distances[rows[nearer]] = drawn[nearer], lengths[nearer]
    return Runners(runners.owners, points, distances, runners.streams)


def _owners(inputs: Tensor, count: int) -> Tensor:
    return torch.arange(len(inputs), device=inputs.device).repeat_interleave(count)


class LinearRegion(NativeAttack):
    """The linear-region attack; see :func:`linear_region`, which says more about what it found.

    Args:
        starts: As all that follow, see :class:`LinearRegionSettings`.
        pool: Images for ``start="nearest"``, ``(P, ...)`` in bounds.

    Example:
        >>> LinearRegion(starts=8, regions=20)
        LinearRegion(LinearRegion)
    """

    name = "LinearRegion"
    traits = AttackTraits(minimum_norm=True, batching="any", leaves_ball=True, failure="input", seeds="generator")

    def __init__(
        self,
        *,
        starts: int = 12,
        start: str = "noise",
        walk: int = 30,
        survivors: int = 4,
        hops: int = 24,
        hop_length: float | None = None,
        hop_steps: int | None = None,
        regions: int = 40,
        halving: int = 3,
        q: float = 0.8,
        gamma: float = 6.0,
        classes: str = "runner-up",
        improvement: tuple[float, float] = (0.02, 0.001),
        iterations: int = 100,
        passes: int | None = None,
        seconds: float | None = None,
        batch: int = 128,
        pool: Tensor | None = None,
    ) -> None:
        self.settings = LinearRegionSettings(
            starts=starts,
            start=start,
            walk=walk,
            survivors=survivors,
            hops=hops,
            hop_length=hop_length,
            hop_steps=hop_steps,
            regions=regions,
            halving=halving,
            q=q,
            gamma=gamma,
            classes=classes,
            improvement=improvement,
            iterations=iterations,
            passes=passes,
            seconds=seconds,
            batch=batch,
        )
        self.pool = pool

    @property
    def description(self) -> str:
        """All settings, and how many images there are to choose from."""
        shown = ", ".join(f"{key}={value!r}" for key, value in asdict(self.settings).items())
        return f"LinearRegion({shown})" + ("" if self.pool is None else f" with a pool of {len(self.pool)} images")

    def search(
        self,
        target: Target,
        inputs: Tensor,
        labels: Tensor,
        *,
        threat_model: ThreatModel,
        generator: torch.Generator,
        targeted: bool = False,
        watch: Watch | None = None,
        starting_points: Tensor | None = None,
    ) -> Tensor:
        """Return the candidates of :func:`linear_region`, see :meth:`NativeAttack.search`."""
        return linear_region(
            target,
            inputs,
            labels,
            threat_model=threat_model,
            generator=generator,
            settings=self.settings,
            starting_points=starting_points,
            pool=self.pool,
            targeted=targeted,
            watch=watch,
        ).candidates
