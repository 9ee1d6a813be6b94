"""Candidates that float32 cannot tell from the boundary count as on it; others that miss it do not."""

import pytest
import torch

from robust_ext import ThreatModel
from robust_ext.evaluations.binarization import plant
from tests.evaluations.subjects import random_classifier

NETWORK, INPUTS, _ = random_classifier()
EPSILONS = {"linf": 0.05, "l2": 0.15, "l1": 0.4}


def at_reach(planted, reach):
    """Points of these reaches ``(N,)`` between the inputs and what is planted."""
    problems, index = planted.problems, range(len(planted))
    low, high = planted.inputs.double(), planted.planted[:, 0].double()
    for _ in range(50):
        middle = (low + high) / 2
        beyond = (problems.reach(planted.features(middle.float()), index) > reach).view(-1, 1, 1, 1)
        low, high = torch.where(beyond, low, middle), torch.where(beyond, middle, high)
    return low.float()


@pytest.mark.parametrize("norm", EPSILONS)
@pytest.mark.parametrize("readout", ["logistic", "max-margin", "nearest", "prototypes"])
@pytest.mark.parametrize("kappa", [0.999, 0.9])
def test_only_points_within_rounding_of_the_boundary_count_as_beyond(norm, readout, kappa):
    ball = ThreatModel(norm=norm, epsilon=EPSILONS[norm])
    planted = plant(NETWORK, INPUTS, ball, readout=readout, kappa=kappa, inner_points=60, planted_candidates=4)
    tolerance = planted.problems.tolerance
    assert bool(((tolerance > 0) & (tolerance <= 5e-4)).all())
    assert planted.score(at_reach(planted, kappa - tolerance / 2)) == 1
    assert planted.score(at_reach(planted, kappa - 2 * tolerance)) == 0
