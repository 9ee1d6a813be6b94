"""The linear-region attack's distances after given amounts of work, and the images along the way.

    python examples/nearest_images.py [--samples 3] [--out progress.png]

On the digits network that comes with the project, in l2. Printed are the mean norm and the passes an image at a few
moments; the file shows the input, and the nearest adversarial image known at each of these moments with its norm
(Croce, Rauber and Hein 2019, figures 1 and 5).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.native import Step
from robust_ext.cli.models import load_model
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset

ENTRIES = 5


def main() -> None:
    """Attack and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--out", type=Path, help="an image file")
    given = parser.parse_args()
    network = load_model("digits").model
    inputs, labels = load_dataset("digits").take(range(given.samples))
    target = Target(
        module=network,
        bounds=(0.0, 1.0),
        classes=10,
        input_shape=tuple(inputs.shape[1:]),
        device=torch.device("cpu"),
    )
    steps: list[Step] = []
    found = LinearRegion(starts=("noise",), draws=4, start_steps=0, hops=0, regions=40).run(
        target,
        inputs,
        labels,
        threat_model=ThreatModel(norm="l2", epsilon=1.0),
        generator=torch.Generator().manual_seed(0),
        watch=steps.append,
    )
    for entry in found.history[:: max(1, len(found.history) // ENTRIES)]:
        regions, passes = (float(count.double().mean()) for count in (entry.regions, entry.passes))
        print(f"{regions:5.1f} regions, {passes:7.1f} passes an image: mean norm {float(entry.distances.mean()):.4f}")
    print(f"nearest adversarial images: mean norm {float(found.distances.mean()):.4f}")
    if given.out is not None:
        draw(given.out, inputs, steps[:: max(1, len(steps) // ENTRIES)][:ENTRIES] + steps[-1:])


def draw(path: Path, inputs: Tensor, steps: list[Step]) -> None:
    """A row for each input."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, rows = plt.subplots(
        len(inputs), len(steps) + 1, figsize=(1.4 * (len(steps) + 1), 1.6 * len(inputs)), squeeze=False
    )
    for row, panels in enumerate(rows):
        norms = ["input", *[f"{-float(step.loss[row]):.3f}" for step in steps]]
        for panel, image, norm in zip(panels, [inputs[row], *[step.points[row] for step in steps]], norms, strict=True):
            panel.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
            panel.set_title(norm, fontsize="small")
            panel.axis("off")
    figure.savefig(path)


if __name__ == "__main__":
    main()
