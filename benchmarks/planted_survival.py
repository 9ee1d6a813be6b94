"""Share of planted points that are adversarial through the whole model, at the batch size of the attack and alone.

python benchmarks/planted_survival.py [--weights FILE --data-root FOLDER] [--readout NAME ...]

Readouts that take several rows of features get those of flipped and shifted images (ensemble, code), or of mixes with
fixed ones (mixing). With --draws, noise is added to the inputs of a random model.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from common import THREAT, load, parser
from torch import Tensor, nn

from robust_ext.evaluations.binarization.attacking import count_planted
from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import fit, measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split
from robust_ext.models.readouts.catalogue import READOUTS

KAPPAS = (0.9, 0.999, 0.9999, 0.99999, 1 - 1e-7)


class Views(nn.Module):
    """Features ``(N, 3, F)`` of three views of images, or of three mixes with other ones."""

    def __init__(self, features: nn.Module, others: Tensor | None) -> None:
        super().__init__()
        self.features, self.others = features, others

    def forward(self, x: Tensor) -> Tensor:
        """Features of ``(N, ...)``."""
        if self.others is None:
            views = [x, x.flip(3), x.roll(1, 2)]
        else:
            views = [0.6 * x + 0.4 * other for other in self.others]
        return torch.stack([self.features(view) for view in views], 1)


class Mean(nn.Module):
    """Logits of features ``(N, 3, F)``: the mean of those of each row."""

    def __init__(self, readout: nn.Module) -> None:
        super().__init__()
        self.readout = readout

    def forward(self, features: Tensor) -> Tensor:
        """Logits ``(N, K)``."""
        found: Tensor = self.readout(features).mean(1)
        return found


class Noisy(nn.Module):
    """Features of inputs with noise of a twentieth."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        """Features of ``(N, ...)``."""
        found: Tensor = self.features(x + torch.randn_like(x) / 20)
        return found


def survival(network: nn.Module, inputs: Tensor, settings: BinarizationSettings) -> None:
    """Print one line a kappa."""
    parts, kind, points = split(network, inputs[:2]), settings.fitting, settings.boundary_points
    features, readout = parts.features, parts.readout
    if len(kind.shown.axes) == 2:
        mixing = settings.readout == "mixing"
        features, readout = Views(features, inputs[:3].flip(3) if mixing else None), Mean(readout)
    if settings.draws > 1:
        features = Noisy(features)
    forward = Forward(kind.measured(features, seed=1), 64)
    problems = fit(measure(forward, inputs, range(len(inputs)), settings), readout, settings)
    rows = [row for row in range(len(inputs)) if problems.separable[row]]
    posed = problems.select(rows)
    for kappa in KAPPAS:
        at = replace(settings, kappa=kappa)
        together = count_planted(posed.classifier(features, at, batching="full", judge=True), posed)
        alone = 0
        for row in range(len(rows)):
            one = posed.select([row])
            alone += int(count_planted(one.classifier(features, at, judge=True), one))
        drawn = points * len(rows)
        print(
            f"{settings.readout:<11} N_b {points:>2}, kappa {kappa:<10.7g} separable {len(rows)}/{len(inputs)}, "
            f"survive together {int(together.sum())}/{drawn}, alone {alone}/{drawn}",
            flush=True,
        )


def main(arguments: argparse.Namespace) -> None:
    """Print one line a setting."""
    network, inputs = load(arguments)
    for readout in arguments.readout or READOUTS:
        for points in (1, 10):
            settings = BinarizationSettings(
                threat_model=THREAT,
                boundary_points=points,
                inner_points=arguments.inner_points,
                readout=readout,
                draws=arguments.draws,
            )
            survival(network, inputs, settings)


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--readout", action="append", help="a readout instead of all of them")
    options.add_argument("--inner-points", type=int, default=999)
    options.add_argument("--draws", type=int, default=1)
    main(options.parse_args())
