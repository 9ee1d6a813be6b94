"""A purifier of one's own at test time, and what is left of it when it is attacked.

    python examples/purifier.py

It pulls each image towards its own median-filtered copy and rounds what comes out, which stops plain gradients. The
same from the command line:

    robust-ext test-time --model digits --defense examples/purifier.py:purify --data digits --eps 0.15 --out run
"""

from __future__ import annotations

import torch
from torch import Tensor

from robust_ext import ThreatModel, evaluate_defense
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network


def purify(images: Tensor) -> Tensor:
    """Images (N, C, H, W) in [0, 1], half way to their 3x3 medians, in eight levels."""
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    windows = padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4)
    return ((0.75 * images + 0.25 * windows.median(-1).values) * 8).round() / 8


def main() -> None:
    """Evaluate it and print the table."""
    digits = load_dataset("digits")
    inputs, labels = digits.take(range(48))
    threat_model = ThreatModel(norm="linf", epsilon=0.15)
    effort = {"steps": 20, "queries": 100}
    print(evaluate_defense(purify, None, inputs, labels, threat_model, classifier=digits_network(), **effort))


if __name__ == "__main__":
    main()
