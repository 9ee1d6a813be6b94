"""The joint loss: that its runs make up for a wrong first weight, and that its loss has the gradient shown."""

import pytest
import torch

from robust_ext.attacks.joint_loss import JointLoss
from robust_ext.core.threat import NORMS
from tests.attacks.defenses import linear_defense, small_defense
from tests.attacks.problems import attacked, watched


@pytest.mark.parametrize(("loss", "alpha"), [("ce", 1e-4), ("margin", 1e4), ("dlr", 1e-4)])
def test_two_runs_make_up_for_a_wrong_first_weight(loss, alpha):
    # Two classes: the logits are padded for DLR.
    problem = linear_defense(60, 6, likeness=0.7)
    feasible = problem.room > 0.02 * problem.threat_model.epsilon
    found = problem.successes(attacked(JointLoss(loss=loss, alpha=alpha, steps=60), problem))
    assert int((found & feasible).sum()) >= 0.95 * int(feasible.sum())


@pytest.mark.parametrize("norm", NORMS)
def test_the_loss_shown_has_the_gradient_shown(norm):
    problem = small_defense(6, norm=norm, epsilon={"linf": 0.2, "l2": 0.5, "l1": 1.5}[norm])
    steps = watched(JointLoss(steps=8, restarts=1, loss="ce"), problem)
    generator = torch.Generator().manual_seed(1)
    for step in steps:
        x = step.points.double()
        way = torch.randn(x.shape, generator=generator).double()
        network = problem.defended.double()
        ends = []
        for sign in (-1, 1):
            logits, score = network.both(x + sign * 1e-4 * way)
            ends.append((torch.nn.functional.cross_entropy(logits, problem.labels, reduction="none"), score))
        logits, score = network.both(x)
        classifier = torch.nn.functional.cross_entropy(logits, problem.labels, reduction="none")
        # The weight follows from the loss that is shown.
        alpha = ((classifier - step.loss) / score).where(score > 0, 0)
        slope = (ends[1][0] - ends[0][0] - alpha * (ends[1][1] - ends[0][1])) / 2e-4
        shown = (step.gradient.double() * way).flatten(1).sum(1)
        # float32 leaves a weight in doubt where the score is next to nothing.
        clear = (score > 0.05) | (score < 0)
        torch.testing.assert_close(shown[clear], slope[clear], rtol=1e-2, atol=1e-3)
        assert bool(clear.any())
        problem.defended.float()
