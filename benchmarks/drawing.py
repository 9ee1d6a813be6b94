"""CPU time of drawing the points of a sample, divided by that of sending them through the network.

    python benchmarks/drawing.py [--imagenet]

The points are those of the default test: 149 inner ones, half of them corners, and 64 candidates; the network is
ResNet-20 (with --imagenet ResNet-18 of torchvision at 224 x 224), folded as in the test. Both alternate in one process.
"""

from __future__ import annotations

import time

import torch
from common import load, parser
from torch import Tensor, nn

from robust_ext.core.target import PassCounter
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.evaluations.binarization.defense import counted_parts
from robust_ext.evaluations.binarization.forward import choose_forward
from robust_ext.evaluations.binarization.points import draw_candidates, draw_inner
from robust_ext.evaluations.binarization.settings import BinarizationSettings

EPSILON = {"linf": 8 / 255, "l2": 0.5, "l1": 12.0}


def shares(network: nn.Module, inputs: Tensor, settings: BinarizationSettings, rounds: int) -> tuple[float, float]:
    """CPU seconds of drawing the points of a sample, and of their forward passes: means over rounds."""
    features = counted_parts(network, inputs, settings, PassCounter()).features
    forward = choose_forward(features, inputs[:2], rows=settings.forward_batch, fold=settings.fold)
    count, size, one = settings.inner_points, max(64, forward.rows), inputs[:1]
    times = []
    for number in range(rounds + 1):
        begin = time.process_time()
        starts = range(0, count, size)
        points = [draw_inner(one, [number], settings, min(size, count - n), start=n)[0] for n in starts]
        points.append(draw_candidates(one, [number], settings)[0])
        drawn = time.process_time()
        forward(torch.cat([*points, one]))
        times.append((drawn - begin, time.process_time() - drawn))
    # The first round warms up.
    drawing, passing = (sum(column) / rounds for column in zip(*times[1:], strict=True))
    return drawing, passing


def main() -> None:
    """Print one line a norm."""
    options = parser(__doc__)
    options.add_argument("--imagenet", action="store_true", help="ResNet-18 of torchvision, random weights, 224 x 224")
    options.add_argument("--rounds", type=int, default=5)
    arguments = options.parse_args()
    network: nn.Module
    if arguments.imagenet:
        from torchvision.models import resnet18

        network, inputs = resnet18().eval(), torch.rand(2, 3, 224, 224)
    else:
        network, inputs = load(arguments)
    for norm in NORMS:
        settings = BinarizationSettings(threat_model=ThreatModel(norm=norm, epsilon=EPSILON[norm]))
        drawing, passing = shares(network, inputs, settings, arguments.rounds)
        print(f"{norm}: {1000 * drawing:.0f} ms to draw, {1000 * passing:.0f} ms forward: {drawing / passing:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
