"""Figures of the patches beside this file, with the Foolbox that is imported: ``python evidence.py CASE``.

All cases run on the digits of scikit-learn (64 values in [0, 1]) and small networks trained here on 1,400 of them.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import foolbox
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

DATA, LABELS = load_digits(return_X_y=True)
X, Y = torch.tensor(DATA / 16, dtype=torch.float32), torch.tensor(LABELS)
TRAIN = 1400


def trained(*widths: int, rate: float, epochs: int, radius: float = 0.0) -> nn.Module:
    """A ReLU network; with a radius, trained on points of five steps of PGD in Linf."""
    torch.manual_seed(0)
    sizes = (64, *widths, 10)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    network = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(network.parameters(), rate)
    for _ in range(epochs):
        points = X[:TRAIN].clone()
        for _ in range(5 if radius else 0):
            points.requires_grad_()
            (gradient,) = torch.autograd.grad(cross_entropy(network(points), Y[:TRAIN]), points)
            moved = points.detach() + radius / 2 * gradient.sign()
            points = (X[:TRAIN] + (moved - X[:TRAIN]).clamp(-radius, radius)).clamp(0, 1)
        optimizer.zero_grad()
        cross_entropy(network(points), Y[:TRAIN]).backward()
        optimizer.step()
    return network.eval()


def apgd() -> None:
    """Robust accuracy under PGD and Auto-PGD of 100 steps, by loss."""
    network = trained(128, 128, rate=3e-3, epochs=300, radius=0.1)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    for norm, epsilons in (("Linf", (0.05, 0.1, 0.15)), ("L2", (0.5, 0.75, 1.0))):
        attacks = {"PGD": getattr(foolbox.attacks, f"{norm}PGD")(steps=100)}
        for loss in ("crossentropy", "logits", "dlr"):
            attacks[f"APGD {loss}"] = getattr(foolbox.attacks, f"{norm}APGD")(steps=100, loss=loss)
        for name, attack in attacks.items():
            torch.manual_seed(1)
            _, _, success = attack(model, X[TRAIN:], Y[TRAIN:], epsilons=epsilons)
            print(norm, name, [round(1 - row.float().mean().item(), 3) for row in success])


def hop_skip_jump() -> None:
    """Median L2 distance of HopSkipJump, samples together and one by one, with three seeds."""
    network = trained(64, rate=1e-2, epochs=200)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    x, y = X[TRAIN : TRAIN + 32], Y[TRAIN : TRAIN + 32]
    right = network(x).argmax(1) == y
    x, y = x[right], y[right]
    predicted = network(X[:TRAIN]).argmax(1)
    starts = torch.stack([X[:TRAIN][predicted != label][0] for label in y])
    attack = foolbox.attacks.HopSkipJumpAttack(steps=8)
    for seed in range(3):
        torch.manual_seed(seed)
        np.random.seed(seed)
        together = attack.run(model, x, y, starting_points=starts)
        rows = [slice(row, row + 1) for row in range(len(x))]
        alone = torch.cat([attack.run(model, x[row], y[row], starting_points=starts[row]) for row in rows])
        print(seed, *(f"{(found - x).norm(dim=1).median():.2f}" for found in (alone, together)))


if __name__ == "__main__":
    {"apgd": apgd, "hop_skip_jump": hop_skip_jump}[sys.argv[1]]()
