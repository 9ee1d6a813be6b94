"""Foolbox's PGD and Brendel-Bethge attack in l2 from many starts.

    robust-ext robust-accuracy ... --attack "PGD x 100=examples/restarts.py:pgd(restarts=100)"
    python examples/restarts.py

Run as a script, it shows what further starts are worth on the project's digits network.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import foolbox
import torch
from torch import Tensor, nn

from robust_ext import ThreatModel, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network


def pgd(restarts: int = 100, steps: int = 40) -> Any:
    """PGD as Croce, Rauber and Hein (2019, section 5) set it: steps of a quarter of epsilon, from random starts.

    Rows that are solved get no further start, which Foolbox's own ``repeat`` would give them.
    """
    return partial(repeated_pgd, restarts=restarts, steps=steps)


def repeated_pgd(
    model: nn.Module, inputs: Tensor, labels: Tensor, *, epsilon: float, restarts: int, steps: int
) -> Tensor:
    """Candidates (N, ...): the first misclassified one of each row, or the last one."""
    attack = foolbox.attacks.L2PGD(rel_stepsize=0.25, steps=steps)
    hosted = foolbox.PyTorchModel(model, bounds=(0, 1), device=inputs.device)
    candidates = inputs.clone()
    open_rows = torch.arange(len(inputs), device=inputs.device)
    for _ in range(restarts):
        found, _, success = attack(hosted, inputs[open_rows], labels[open_rows], epsilons=epsilon)
        candidates[open_rows] = found
        open_rows = open_rows[~success]
        if len(open_rows) == 0:
            break
    return candidates


def brendel_bethge(restarts: int = 10, steps: int = 1000) -> Any:
    """The Brendel-Bethge attack from blended noise (Foolbox's own start); the nearest result of each row counts."""
    return foolbox.attacks.L2BrendelBethgeAttack(steps=steps).repeat(restarts)


def main() -> None:
    """Robust accuracy of the digits network after one start and after five."""
    inputs, labels = load_dataset("digits").take(range(30))
    attacks = {f"PGD x {number}": pgd(restarts=number, steps=10) for number in (1, 5)}
    threat_model = ThreatModel(norm="l2", epsilon=0.25)
    print(robust_accuracy(digits_network(), attacks, inputs, labels, threat_model, epsilons=[0.5, 0.75]))


if __name__ == "__main__":
    main()
