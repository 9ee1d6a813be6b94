"""The joint loss: what it reaches on linear problems, and how each row looks for its weight."""

import pytest
import torch

from robust_ext.attacks.joint_loss import JointLoss, _Weights
from robust_ext.core.threat import NORMS
from robust_ext.testing.defenses import linear_defense, small_defense
from tests.attacks.problems import attacked, watched


@pytest.mark.parametrize(("loss", "alpha"), [("ce", 1e-4), ("margin", 1e4), ("dlr", 1e-4)])
def test_the_search_makes_up_for_a_wrong_first_weight(loss, alpha):
    # Two classes: the logits are padded for DLR.
    problem = linear_defense(60, 6, likeness=0.7)
    feasible = problem.room > 0.02 * problem.threat_model.epsilon
    found = problem.successes(attacked(JointLoss(loss=loss, alpha=alpha, steps=60), problem))
    assert int((found & feasible).sum()) >= 0.95 * int(feasible.sum())
    if alpha == 1e-4:
        once = problem.successes(attacked(JointLoss(loss=loss, alpha=alpha, steps=60, restarts=1), problem))
        assert int((once & feasible).sum()) < 0.9 * int(feasible.sum())


def test_the_weight_is_bisected():
    weights = _Weights(torch.zeros(4, 1), 1.0)
    one = torch.ones(4, 1)
    assert weights.of(one, one).tolist() == [1, 1, 1, 1]

    def learn(solved, misclassified, passed):
        weights.learn(torch.tensor(solved), torch.tensor(misclassified), torch.tensor(passed))
        return weights.of(one, one).tolist()

    # Rejected: up. Passes but is not misclassified: down. Solved: stays.
    after = learn([False, False, False, True], [True, False, False, True], [False, True, False, True])
    assert after == pytest.approx([10, 0.1, 10, 1])
    after = learn([False] * 4, [True, False, False, True], [False, True, True, True])
    # The third now has both ends, 1 and 10; the fourth has a misclassified point that passes: nothing to learn.
    assert after == pytest.approx([100, 0.01, 10**0.5, 1])
    after = learn([False] * 4, [True] * 4, [False] * 4)
    assert after == pytest.approx([1000, 0.01**0.5 * 0.1**0.5, 10**0.75, 10])


def test_weights_are_in_units_of_the_first_gradients():
    weights = _Weights(torch.zeros(3, 2), 2.0)
    of_loss = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    of_score = torch.tensor([[0.0, 10.0], [1.0, 0.0], [0.0, 0.0]])
    assert weights.of(of_loss, of_score).tolist() == [1, 2, 2]
    # The first row keeps its unit; the others get theirs as soon as both gradients are there.
    assert weights.of(of_score, of_loss + 1).tolist() == pytest.approx([1, 2 / 2**0.5, 2])


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
