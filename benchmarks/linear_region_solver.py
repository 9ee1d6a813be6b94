"""Seconds of an iteration of the linear-region solver, over those of the two products that it needs.

    python benchmarks/linear_region_solver.py [--problems 32 --inputs 784 --rows 5000 --iterations 20]

The products are those of dense float32 matrices of random numbers, on the CPU. Solver and bare products alternate, and
the shortest times count. A network's products cost less than dense ones, so its own ratio is higher.
"""

from __future__ import annotations

import argparse

import torch
from common import seconds

from robust_ext.attacks.linear_region.problem import estimate_scaling
from robust_ext.attacks.linear_region.solver import solve
from robust_ext.core.threat import NORMS
from tests.attacks.linear_region.test_solver import DenseConstraints


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("problems", 32), ("inputs", 784), ("rows", 5000), ("iterations", 20), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(given.problems, given.rows, given.inputs, generator=generator)
    x = torch.rand(given.problems, given.inputs, generator=generator)
    # Just infeasible at the inputs and hard to satisfy, so that no problem ends before the cap.
    offset = -torch.bmm(matrix, x.unsqueeze(2)).squeeze(2) - 0.1
    constraints = DenseConstraints(matrix, offset, torch.zeros(given.rows) > 0)
    scaling = estimate_scaling(constraints, x, generator=generator, probes=2, power_iterations=2)
    multipliers = torch.rand(given.problems, given.rows, generator=generator)
    ways = {"scaling": scaling, "tolerance": 1e-9, "margin": 1e9}

    def solver(norm: str) -> None:
        found = solve(constraints, x, norm=norm, bounds=(0, 1), iterations=given.iterations, **ways)
        if bool((found.iterations < given.iterations).any()):
            raise SystemExit("a problem ended early, so the times mean nothing")

    def products() -> None:
        for _ in range(given.iterations):
            constraints.forward(x)
            constraints.adjoint(multipliers)

    for norm in NORMS:
        bare, whole = [], []
        for _ in range(given.repeats):
            bare.append(seconds(products) / given.iterations)
            whole.append(seconds(lambda: solver(norm)) / given.iterations)  # noqa: B023
        print(
            f"{norm:4s}: {1e3 * min(whole):.1f} ms an iteration, {1e3 * min(bare):.1f} ms its products, "
            f"ratio {min(whole) / min(bare):.2f}"
        )


if __name__ == "__main__":
    main()
