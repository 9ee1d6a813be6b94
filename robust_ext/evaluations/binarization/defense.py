"""A detector in the binarization test: which points it lets pass, and points that it lets pass to be planted.

Zimmermann et al. 2022, section 3.2 and algorithm 2. In the regular test adversarial examples are to go undetected; in
the inverted test they are to be detected. Planted points and references are redrawn until the detector agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from robust_ext.attacks.apgd import APGD
from robust_ext.core.random import derive_seed, seeded_globals, stream
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.detectors.base import Detector
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.defended import Defended, SuccessMargin

TESTS = ("regular", "inverted")

# Points queried at once while one is sought.
_BLOCK = 16
# Runs of an attack on the original classifier, where random points are never detected.
_ATTACKS = 8


@dataclass(frozen=True, kw_only=True)
class Defense:
    """A detector beside the network that is tested.

    Args:
        detector: With a threshold; it watches the network.
        inverted: Whether to reject what it lets pass (the inverted test).
        exposure: What attacks on logits are shown: ``"classifier"``, ``"reject"`` (a class for being rejected) or
            ``"margin"`` (class 1 only where misclassified and not rejected).
        draws: How often a random detector is queried; the majority decides.
    """

    detector: Detector
    inverted: bool
    exposure: str = "classifier"
    draws: int = 1

    @property
    def test(self) -> str:
        """One of :data:`TESTS`."""
        return TESTS[self.inverted]

    def rejects(self, points: Tensor, *, seed: int) -> Tensor:
        """Which points ``(n, ...)`` are rejected, bool ``(n,)``; a random detector is queried several times.

        Args:
            points: In bounds, on the detector's device.
            seed: Of a random detector's draws.
        """
        times = self.draws if self.detector.random else 1
        with seeded_globals(seed):
            votes = torch.stack([self.detector.decide(points) for _ in range(times)]).sum(0)
        return (votes * 2 > times) ^ self.inverted

    def accepts(self, points: Tensor, *, seed: int) -> Tensor:
        """Which points ``(n, ...)`` are surely not rejected, bool ``(n,)``: a random detector never rejects them.

        It is queried twice as often, so that what is planted stays what it is when it is queried again.
        """
        times = 2 * self.draws if self.detector.random else 1
        accepted = torch.ones(len(points), dtype=torch.bool, device=points.device)
        with seeded_globals(seed):
            for _ in range(times):
                # Only those that are not rejected yet are queried again.
                left = accepted.nonzero().squeeze(1)
                if not len(left):
                    break
                accepted[left] = self.detector.decide(points[left]) == self.inverted
        return accepted

    def defended(self, classifier: nn.Module) -> Defended:
        """A classifier together with the detector."""
        exposure = "classifier" if self.exposure == "margin" else self.exposure
        return Defended(classifier, self.detector, inverted=self.inverted, exposure=exposure)

    def exposed(self, defended: Defended) -> tuple[nn.Module, int]:
        """What attacks on logits are shown of a binarized classifier with the detector, and its number of classes."""
        if self.exposure == "margin":
            return SuccessMargin(defended, 0), 2
        return (defended, 3) if self.exposure == "reject" else (defended.classifier, 2)


@dataclass(frozen=True)
class Drawn:
    """Points to plant for one sample.

    Args:
        planted: ``(N_b, ...)``; None where no point was found that is not rejected.
        references: ``(N_r, ...)``, outside the ball; None likewise.
        source: ``"random"``, or ``"attack"`` where random points were all rejected.
        tries: Points queried.
    """

    planted: Tensor | None
    references: Tensor | None
    source: str
    tries: int


def draw_accepted(x: Tensor, sample: int, settings: BinarizationSettings, defense: Defense) -> Drawn:
    """Draw what is to be planted for one sample, by rejection sampling.

    Random points come first. In the inverted test, where none is detected among ``settings.planting_tries``, points
    that an attack on the original classifier found are tried (the paper takes such examples from the first).

    Args:
        x: The clean sample.
        sample: Its id.
        settings: Of the test.
        defense: The detector.
    """
    tries = 0
    for source in ("random", "attack") if defense.inverted else ("random",):
        parts: list[Tensor | None] = []
        for purpose, count, radius in (
            ("boundary", settings.boundary_points, 1.0),
            ("reference", settings.reference_points, settings.reference_distance),
        ):
            found, queried = _accepted(x, sample, settings, defense, purpose, count, radius, source)
            parts.append(found)
            tries += queried
            if found is None:
                break
        if all(part is not None for part in parts):
            return Drawn(parts[0], parts[1], source, tries)
    return Drawn(None, None, source, tries)


def _accepted(
    x: Tensor,
    sample: int,
    settings: BinarizationSettings,
    defense: Defense,
    purpose: str,
    count: int,
    radius: float,
    source: str,
) -> tuple[Tensor | None, int]:
    """``count`` points that are not rejected, or None, and how many were queried."""
    key: tuple[int | str, ...] = (sample, purpose, defense.test, source)
    kept: list[Tensor] = []
    queried = found = block = 0
    candidates = _random_points if source == "random" else _attacked_points
    while found < count and (points := candidates(x, settings, defense, radius, block, key)) is not None:
        seed = derive_seed(settings.seed, *key, "detector", block)
        good = points[defense.accepts(points, seed=seed)]
        # In the ball for what is planted; never in it for references, which would give the planted point away.
        distance = settings.threat_model.distance(good, x[None].expand_as(good)) / settings.threat_model.epsilon
        good = good[distance > 1.02] if radius > 1 else good[distance <= 1 + 1e-5]
        kept.append(good)
        queried += len(points)
        found += len(good)
        block += 1
    return (torch.cat(kept)[:count] if found >= count else None) if count else x[None][:0], queried


def _ball(settings: BinarizationSettings, radius: float) -> ThreatModel:
    return replace(settings.threat_model, epsilon=settings.threat_model.epsilon * radius)


def _random_points(
    x: Tensor, settings: BinarizationSettings, defense: Defense, radius: float, block: int, key: tuple[int | str, ...]
) -> Tensor | None:
    if block * _BLOCK >= settings.planting_tries:
        return None
    ball = _ball(settings, radius)
    draw: Callable[..., Tensor] = ball.sample_corners if settings.corners else ball.sample_surface
    return draw(x, min(_BLOCK, settings.planting_tries - block * _BLOCK), generator=stream(settings.seed, *key, block))


def _attacked_points(
    x: Tensor, settings: BinarizationSettings, defense: Defense, radius: float, block: int, key: tuple[int | str, ...]
) -> Tensor | None:
    if block:
        return None
    network = defense.detector.classifier
    rows = x[None].repeat(_ATTACKS, *[1] * x.dim())
    with torch.no_grad():
        logits = network(rows[:1])
    target = Target(
        module=network,
        bounds=settings.threat_model.bounds,
        classes=logits.shape[1],
        input_shape=tuple(x.shape),
        device=x.device,
    )
    labels = logits.argmax(1).expand(_ATTACKS).clone()
    path: list[Tensor] = []
    APGD(steps=40, loss="margin").run(
        target,
        rows,
        labels,
        threat_model=_ball(settings, radius),
        generator=stream(settings.seed, *key, block),
        watch=lambda step: path.append(step.points.clone()),
    )
    # The path too: what is detected best need not be where the loss is highest.
    return torch.cat(path[::4])
