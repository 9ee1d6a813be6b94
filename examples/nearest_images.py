"""The linear-region attack's distances after given amounts of work, and the images along the way.

    python examples/nearest_images.py [--samples 3] [--out progress.png]
    python examples/nearest_images.py --model examples/networks.py:wong_kolter_mnist --weights FILE --data mnist
        --data-root FOLDER --out progress.png

Croce, Rauber and Hein (2019), figures 1, 5 and 6: the paper's algorithm in l2 from one start, by default on the digits
network that comes with the project. Printed are the mean norm and the passes an image at a few moments, and how far the
solution in the first region lies from the point that was searched for on the line to the start, which is in the same
region. The file has a row for each input: the training image, that point, the solution in its region, the nearest
images at a few moments, and the input; above each are its two likeliest classes and its distance to the input.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from robust_ext.attacks.linear_region.attack import LinearRegion
from robust_ext.attacks.linear_region.network.recording import record_checked
from robust_ext.attacks.native import Step
from robust_ext.cli.models import load_model
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.datasets import load_dataset

ENTRIES, POOL, BOUNDS = 4, 5000, (0.0, 1.0)


def main() -> None:
    """Attack and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--regions", type=int, default=40)
    parser.add_argument("--model", default="digits", help="as on the command line")
    parser.add_argument("--weights", help="its state dict")
    parser.add_argument("--data", default="digits")
    parser.add_argument("--data-root", help="folder with its files")
    parser.add_argument("--out", type=Path, help="an image file")
    given = parser.parse_args()
    network = load_model(given.model, weights=given.weights).model
    test, train = (load_dataset(given.data, root=given.data_root, split=split) for split in ("test", "train"))
    (inputs, labels), (pool, classes) = test.take(range(given.samples)), train.take(range(min(POOL, len(train))))
    target = Target(
        module=network,
        bounds=BOUNDS,
        classes=len(test.class_names),
        input_shape=tuple(inputs.shape[1:]),
        device=torch.device("cpu"),
    )
    steps: list[Step] = []
    found = LinearRegion.paper(pool, labels=classes, points=1, regions=given.regions).run(
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
    steps = [step for step in steps if bool(torch.isfinite(step.loss).all())]
    searched, solved = steps[0].points, steps[1].points
    regions_of = record_checked(network, inputs, BOUNDS).at(searched)
    constraints, _ = regions_of.forward(solved)
    for row, least in enumerate(constraints.amin(1).tolist()):
        near, far = (float((points[row] - inputs[row]).norm()) for points in (solved, searched))
        apart = float((solved[row] - searched[row]).norm())
        print(
            f"image {row}: first region from {far:.3f} to {near:.3f}, {apart:.3f} apart; "
            f"its constraints hold to within {max(0.0, -least):.0e}"
        )
    if given.out is not None:
        later = [step.points for step in steps[2 :: max(1, len(steps) // ENTRIES)]][:ENTRIES]
        panels = [starts(network, inputs, labels, pool, classes), searched, solved, *later, found.candidates, inputs]
        draw(given.out, network, panels)


@torch.no_grad()
def starts(network: nn.Module, inputs: Tensor, labels: Tensor, pool: Tensor, classes: Tensor) -> Tensor:
    """The nearest training image of each input's likeliest other class, among those that are classified correctly."""
    likeliest = network(inputs).scatter(1, labels[:, None], -torch.inf).argmax(1)
    right = network(pool).argmax(1) == classes
    distances = torch.cdist(inputs.flatten(1), pool.flatten(1))
    return pool[distances.masked_fill(~right | (classes != likeliest[:, None]), torch.inf).argmin(1)]


def draw(path: Path, network: nn.Module, panels: list[Tensor]) -> None:
    """A row for each input, which is the last panel."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    inputs = panels[-1]
    figure, rows = plt.subplots(
        len(inputs), len(panels), figsize=(1.3 * len(panels), 1.7 * len(inputs)), squeeze=False, layout="constrained"
    )
    for points, column in zip(panels, rows.T, strict=True):
        with torch.no_grad():
            likeliest = network(points).topk(2).indices.tolist()
        for panel, image, origin, (first, second) in zip(column, points, inputs, likeliest, strict=True):
            panel.imshow(image.permute(1, 2, 0).squeeze(2).numpy(), cmap="gray", vmin=0, vmax=1)
            on_boundary = points is not panels[0] and points is not inputs
            words = f"{first}/{second}" if on_boundary else f"{first}"
            panel.set_title(f"{words}, d = {float((image - origin).norm()):.2f}", fontsize="x-small")
            panel.axis("off")
    figure.savefig(path)


if __name__ == "__main__":
    main()
