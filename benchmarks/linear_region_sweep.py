"""The sampling of linear regions swept: q, the side of the input, and gamma, how close to the best point.

    python benchmarks/linear_region_sweep.py mnist_plain=FILE --mnist FOLDER --out sweep.svg [--images 16]
    python benchmarks/linear_region_sweep.py gtsrb_plain=FILE --gtsrb FOLDER --gamma 9 --out signs.svg

As section 5.5 of Croce, Rauber and Hein (2019), figures 1 and 2, and with traffic signs 3 and 4: the paper's algorithm
with one start, the nearest of 5,000 training images, on the first test images that the network classifies correctly;
without ``--exact`` one problem a region, of the likeliest class, and 100 iterations instead of 500. Prints median,
maximum and mean of the l2 norms at several numbers of regions, and draws them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from linear_region import searched
from linear_region_networks import NETWORKS, load, name_of, parser
from torch import Tensor

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.datasets import load_dataset

QS, GAMMAS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), tuple(map(float, range(1, 10)))
POOL = 5000
STATISTICS = {"median": torch.Tensor.median, "maximum": torch.Tensor.max, "mean": torch.Tensor.mean}
Curve = list[tuple[float, Tensor]]


def main() -> None:
    """Measure, print and draw."""
    options = parser(__doc__, networks=1)
    options.add_argument("--out", type=Path, required=True, help="an image file, .svg or .png")
    options.add_argument("--regions", type=int, default=64)
    options.add_argument("--gamma", type=float, default=6.0, help="while q is swept (the paper's 6, and 9 for signs)")
    options.add_argument("--exact", action="store_true", help="a problem for each class, 500 iterations")
    given = options.parse_args()
    torch.set_num_threads(1)
    sample = load(given.networks[0], given)
    data = NETWORKS[name_of(given.networks[0])][1]
    train = load_dataset(data, root=getattr(given, data, None), split="train")
    pool, labels = train.take(range(min(POOL, len(train))))
    attack = LinearRegion.paper(pool, labels=labels, points=1, regions=given.regions)
    if not given.exact:
        attack = replace(attack, classes="runner-up", iterations=100)
    curves: dict[tuple[float, float], Curve] = {}
    for q, gamma in dict.fromkeys([(q, given.gamma) for q in QS] + [(0.8, gamma) for gamma in GAMMAS]):
        found, seconds = searched(replace(attack, q=q, gamma=gamma), sample, "l2")
        curve = [(float(m.regions.double().mean()), m.distances) for m in found.history]
        curves[q, gamma] = curve
        shown = ", ".join(
            f"{min(curve, key=lambda point: abs(point[0] - wanted))[1].mean():.3f} at {wanted:.0f}"
            for wanted in (given.regions / 16, given.regions / 4, given.regions)
        )
        last = "; ".join(f"{name} {float(of(curve[-1][1])):.3f}" for name, of in STATISTICS.items())
        print(f"q {q}, gamma {gamma:g}: mean {shown} regions; in the end {last}; {seconds:.0f} CPU s", flush=True)
    draw(curves, given.gamma, given.out)


def draw(curves: dict[tuple[float, float], Curve], fixed: float, path: Path) -> None:
    """A row for each of the two parameters, a panel for each statistic."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "robust_ext"
    figure, rows = plt.subplots(2, 3, figsize=(10, 6), sharex=True, layout="constrained")
    families = (
        [(f"q = {q}", curves[q, fixed]) for q in QS],
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
