"""What JointLoss and OrthogonalPGD find on small detectors, in how many passes of the batch.

    python benchmarks/joint_loss.py [--rows 100]

Linear classifiers with linear detectors, of which linear programs know how many rows can be had, and a network of two
layers whose hidden units are watched. A pass is a step's: one forward, two backward.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from robust_ext.attacks.base import Attack
from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.attacks.orthogonal import OrthogonalPGD
from tests.attacks.defenses import Problem, linear_defense, small_defense

# Shares of a gradient below which a step of orthogonal PGD is the selective one, besides its own.
SHARES = (1e-6, 0.03, 0.1, 0.6, 1.1)
ATTACKS: dict[str, Attack] = {
    "OrthogonalPGD, 100": OrthogonalPGD(steps=100),
    "JointLoss, 100": JointLoss(steps=50),
    "JointLoss, 200": JointLoss(steps=100),
    "JointLoss, 200, alpha .001": JointLoss(steps=100, alpha=1e-3),
    "JointLoss, 200, alpha 1000": JointLoss(steps=100, alpha=1e3),
}


def problems(rows: int) -> dict[str, Problem]:
    """Problems by name."""
    found = {}
    for norm, epsilons in (("linf", (0.12, 0.18)), ("l2", (0.3, 0.45))):
        found[f"linear {norm}"] = linear_defense(rows, 8, norm=norm, likeness=0.7)
        found |= {f"hidden {norm} {epsilon}": small_defense(rows, norm=norm, epsilon=epsilon) for epsilon in epsilons}
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100)
    torch.set_num_threads(1)
    given = problems(parser.parse_args().rows)
    print(f"{'found':28}" + "".join(f"{name:>18}" for name in given))
    for name, attack in ATTACKS.items():
        show(name, attack, given)
    for share in SHARES:
        with mock.patch("robust_ext.attacks.orthogonal._STUCK", share):
            show(f"OrthogonalPGD, share {share:g}", OrthogonalPGD(steps=100), given)


def show(name: str, attack: Attack, given: dict[str, Problem]) -> None:
    """Print how many rows of each problem an attack finds."""
    counts = []
    for problem in given.values():
        generator = torch.Generator().manual_seed(0)
        model = {"threat_model": problem.threat_model, "generator": generator}
        out = attack.search(problem.target, problem.inputs, problem.labels, **model)
        counts.append(int(problem.successes(out).sum()))
    print(f"{name:28}" + "".join(f"{count:>18}" for count in counts), flush=True)


if __name__ == "__main__":
    main()
