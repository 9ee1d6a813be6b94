"""The sampling of linear regions swept: q, the side of the input, and gamma, how close to the best point.

    python benchmarks/linear_region_sweep.py wong_kolter_mnist=FILE --mnist FOLDER --out sweep.svg [--images 20]

As section 5.5 of Croce, Rauber and Hein (2019): regions alone, without the steps and hops that come first by default,
from blended noise, on the first test images that the network classifies correctly. Prints median, maximum and mean of
the l2 norms at several numbers of regions, and draws them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from linear_region import searched
from linear_region_networks import load, parser
from torch import Tensor

from robust_ext.attacks.linear_region.attack import LinearRegion

QS, GAMMAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (1.0, 3.0, 6.0, 9.0)
STATISTICS = {"median": torch.Tensor.median, "maximum": torch.Tensor.max, "mean": torch.Tensor.mean}
Curve = list[tuple[float, Tensor]]


def main() -> None:
    """Measure, print and draw."""
    options = parser(__doc__, networks=1)
    options.add_argument("--out", type=Path, required=True, help="an image file, .svg or .png")
    options.add_argument("--regions", type=int, default=160)
    given = options.parse_args()
    torch.set_num_threads(1)
    sample = load(given.networks[0], given)
    curves: dict[tuple[float, float], Curve] = {}
    for q, gamma in dict.fromkeys([(q, 6.0) for q in QS] + [(0.8, gamma) for gamma in GAMMAS]):
        alone: dict[str, Any] = {"starts": ("noise",), "draws": 4, "start_steps": 0, "hops": 0, "budget": 1e8}
        attack = LinearRegion(**alone, regions=given.regions, q=q, gamma=gamma)
        found, seconds = searched(attack, sample, "l2")
        curve = [(float(m.regions.double().mean()), m.distances) for m in found.history]
        curves[q, gamma] = curve
        shown = ", ".join(
            f"{min(curve, key=lambda point: abs(point[0] - wanted))[1].mean():.3f} at {wanted:.0f}"
            for wanted in (given.regions / 16, given.regions / 4, given.regions)
        )
        last = "; ".join(f"{name} {float(of(curve[-1][1])):.3f}" for name, of in STATISTICS.items())
        print(f"q {q}, gamma {gamma:g}: mean {shown} regions; in the end {last}; {seconds:.0f} CPU s", flush=True)
    draw(curves, given.out)


def draw(curves: dict[tuple[float, float], Curve], path: Path) -> None:
    """A row for each of the two parameters, a panel for each statistic."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "robust_ext"
    figure, rows = plt.subplots(2, 3, figsize=(10, 6), sharex=True, layout="constrained")
    families = (
        [(f"q = {q}", curves[q, 6.0]) for q in QS],
        [(f"gamma = {gamma:g}", curves[0.8, gamma]) for gamma in GAMMAS],
    )
    for panels, family in zip(rows, families, strict=True):
        for panel, (name, of) in zip(panels, STATISTICS.items(), strict=True):
            for label, curve in family:
                panel.plot([at for at, _ in curve], [float(of(distance)) for _, distance in curve], label=label)
            panel.set_title(f"{name} of l2 norms")
            panel.set_ylim(0.8 * float(of(family[0][1][-1][1])), 3 * float(of(family[0][1][-1][1])))
            panel.set_xlabel("regions an image")
        panels[2].legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
