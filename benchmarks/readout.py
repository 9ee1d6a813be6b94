"""The batched logistic regression against scikit-learn's, one problem after the other, on the same features.

    python benchmarks/readout.py [--weights FILE --data-root FOLDER]

Prints the smallest cosine between the directions (scikit-learn's newton-cholesky run to convergence), and the time of
the batched solver divided by that of scikit-learn's default solver (lbfgs, tol 1e-4), which often stops far from the
minimum, and of newton-cholesky.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from common import THREAT, load, parser, seconds
from sklearn.linear_model import LogisticRegression

from robust_ext.evaluations.binarization.forward import Forward
from robust_ext.evaluations.binarization.problems import measure
from robust_ext.evaluations.binarization.settings import BinarizationSettings
from robust_ext.models.features import split
from robust_ext.models.readouts import fit_directions


def main() -> None:
    """Print cosines and ratios for several C."""
    options = parser(__doc__)
    options.set_defaults(samples=10)
    arguments = options.parse_args()
    network, inputs = load(arguments)
    settings = BinarizationSettings(threat_model=THREAT)
    measured = measure(Forward(split(network, inputs[:2]).features, 64), inputs, range(len(inputs)), settings)
    features = measured.features
    planted = torch.arange(features.shape[1]) > settings.inner_points
    warnings.simplefilter("ignore")
    for C in (1.0, 10.0, 100.0):
        fitted = fit_directions(features, planted, C=C)
        scaled = ((features.double() - fitted.center[:, None]) / fitted.scale[:, None, None]).numpy()

        def peer(solver: str, tol: float, C: float = C, scaled: np.ndarray = scaled) -> np.ndarray:
            fits = [
                LogisticRegression(C=C, solver=solver, tol=tol, max_iter=20000).fit(x, planted.numpy()).coef_[0]
                for x in scaled
            ]
            return np.array([weight / np.linalg.norm(weight) for weight in fits])

        exact, default = peer("newton-cholesky", 1e-8), peer("lbfgs", 1e-4)
        ours = seconds(lambda C=C: fit_directions(features, planted, C=C), repeats=5)
        theirs = {
            name: seconds(lambda n=name, t=tol: peer(n, t), repeats=3)
            for name, tol in (("lbfgs", 1e-4), ("newton-cholesky", 1e-4))
        }
        weight = fitted.weight.numpy()
        print(
            f"C={C:<6g} smallest cosine to converged scikit-learn {(weight * exact).sum(1).min():.6f}"
            f" (to its default {(weight * default).sum(1).min():.3f});  time / lbfgs = {ours / theirs['lbfgs']:.2f}"
            f"  time / newton-cholesky = {ours / theirs['newton-cholesky']:.2f}"
        )


if __name__ == "__main__":
    main()
