"""Figures of the patches beside this file, with the Foolbox that is imported: ``python evidence.py CASE``.

All cases run on the digits of scikit-learn (64 values in [0, 1]) and small networks trained here on 1,400 of them.
"""

from __future__ import annotations

import sys
import time
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


def linear_region() -> None:
    """Mean distance and processor seconds of linear regions, the search that they begin with, and Brendel-Bethge."""
    network = trained(64, 64, rate=3e-3, epochs=300, radius=0.1)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    x, y = X[TRAIN : TRAIN + 40], Y[TRAIN : TRAIN + 40]
    right = network(x).argmax(1) == y
    x, y = x[right], y[right]
    for norm, order, bethge in (("L2", 2, "L2"), ("Linf", np.inf, "Linfinity")):
        brendel_bethge = getattr(foolbox.attacks, f"{bethge}BrendelBethgeAttack")
        regions = getattr(foolbox.attacks, f"{norm}LinearRegionAttack")
        brendel_bethge(steps=2).run(model, x, y)  # Numba compiles
        attacks = {
            "boundary search": getattr(foolbox.attacks, f"{norm}BoundarySearchAttack")(),
            "linear regions": regions(steps=50),
            "Brendel-Bethge": brendel_bethge(steps=1000),
        }
        for name, attack in attacks.items():
            torch.manual_seed(1)
            np.random.seed(1)
            start = time.process_time()
            found = attack.run(model, x, y)
            seconds = time.process_time() - start
            wrong = (network(found).argmax(1) != y).all().item()
            mean = (found - x).norm(order, dim=1).mean().item()
            print(norm, name, f"{mean:.5f}", f"{seconds:.1f} s", "" if wrong else "not all adversarial")


def noise() -> None:
    """Share of L-infinity noise beyond epsilon, and the largest size in epsilons, by the number of values."""
    model = foolbox.PyTorchModel(nn.Flatten().eval(), bounds=(-10, 10), device="cpu")
    for values in (4, 64, 3072):
        torch.manual_seed(0)
        inputs = torch.zeros(2000, values)
        attack = foolbox.attacks.LinfAdditiveUniformNoiseAttack()
        found = attack.run(model, inputs, torch.zeros(len(inputs), dtype=torch.long), epsilon=0.1)
        sizes = found.abs().amax(1) / 0.1
        print(values, f"{(sizes > 1 + 1e-5).float().mean():.1%} {sizes.max():.2f}")


def width() -> None:
    """Median distance by DDN and FMN relative to the width of the bounds."""
    network = trained(64, rate=1e-2, epochs=200)
    model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
    right = network(X).argmax(1) == Y
    x, y = X[TRAIN:][right[TRAIN:]][:100], Y[TRAIN:][right[TRAIN:]][:100]
    for name, order in (("DDN", 2), ("L2FMN", 2), ("LInfFMN", np.inf)):
        for upper in (1, 255):
            wide = model.transform_bounds((0, upper))
            found = getattr(foolbox.attacks, f"{name}Attack")().run(wide, x * upper, y) / upper
            distances = (found - x).norm(order, dim=1)
            distances[network(found).argmax(1) == y] = np.inf
            print(name, upper, f"{distances.median():.3f} {distances.isfinite().sum()} of {len(x)}")


if __name__ == "__main__":
    cases = (apgd, hop_skip_jump, linear_region, noise, width)
    {case.__name__: case for case in cases}[sys.argv[1]]()
