"""Points at which a network returns logits that are not finite are kept, whatever the attack makes of them."""

import pytest
import torch
from torch import nn

from robust_ext.core.errors import AttackError
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.recorder import record_queries


class BreaksAbove(nn.Module):
    """NaN where the first value is above .5."""

    def forward(self, x):
        first = x.flatten(1)[:, :1]
        return torch.where(first > 0.5, torch.nan, torch.cat([first, -first], 1))


def watching(module, inputs, threat_model):
    return record_queries(target_of(module), inputs, torch.zeros(len(inputs), dtype=torch.int64), threat_model)


def target_of(module, shape=(2,)):
    return Target(module=module, bounds=(0.0, 1.0), classes=2, input_shape=shape, device=torch.device("cpu"))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_nearest_point_in_the_ball_is_kept(norm):
    """In a full batch by row; in other batches for every input in whose ball it lies."""
    inputs = torch.tensor([[0.4, 0.4], [0.45, 0.4], [0.1, 0.4]])
    threat_model, module = ThreatModel(norm=norm, epsilon=0.2), BreaksAbove()
    with watching(module, inputs, threat_model) as recorder:
        module(inputs)
        assert recorder.witnesses.points is None
        module(torch.tensor([[0.58, 0.4], [0.99, 0.4], [0.55, 0.4]]))
        assert torch.equal(recorder.witnesses.points[0], torch.tensor([0.58, 0.4]))
        assert recorder.witnesses.points[1:].isnan().all()
        # The first two lie in both balls, the third in none, the fourth out of bounds.
        module(torch.tensor([[0.53, 0.4], [0.56, 0.4], [0.9, 0.9], [0.55, -0.01]]))
        module(torch.tensor([[0.54, 0.4], [0.52, 0.4], [0.3, 0.4]]))
    module(torch.tensor([[0.501, 0.4]]))
    assert torch.equal(recorder.witnesses.points[:2], torch.tensor([[0.53, 0.4], [0.52, 0.4]]))
    assert recorder.witnesses.points[2].isnan().all()
    assert not module._forward_hooks


def test_points_are_kept_as_they_were_queried():
    """Attacks work on their points in place."""
    module, inputs = BreaksAbove(), torch.full((1, 2), 0.45)
    with watching(module, inputs, ThreatModel(norm="linf", epsilon=0.1)) as recorder:
        points = inputs + 0.1
        module(points)
        points.zero_()
    torch.testing.assert_close(recorder.witnesses.points, torch.full((1, 2), 0.55))


def test_finite_logits_whose_sum_is_not_are_no_witness():
    logits = [torch.full((2, 2), 3e38), torch.tensor([[torch.inf, -torch.inf], [0.0, 0.0]])]

    class Returning(nn.Module):
        def forward(self, x):
            return logits.pop(0)

    module, inputs = Returning(), torch.full((2, 2), 0.4)
    with watching(module, inputs, ThreatModel(norm="linf", epsilon=0.3)) as recorder:
        module(inputs + 0.1)
        assert recorder.witnesses.points is None
        module(inputs + 0.1)
    assert recorder.witnesses.points.isnan().any(1).tolist() == [False, True]


@pytest.mark.parametrize(("value", "added"), [(0.45, "$"), (0.55, "; before that, the model returned NaN .*fix")])
def test_an_attack_that_raises_after_it_met_them_is_not_blamed_alone(value, added):
    inputs, module = torch.full((1, 2), 0.45), BreaksAbove()

    def raising():
        with watching(module, inputs, ThreatModel(norm="linf", epsilon=0.2)):
            module(torch.full((1, 2), value))
            raise AttackError("attack: raised ValueError")

    with pytest.raises(AttackError, match=f"^attack: raised ValueError{added}"):
        raising()
    assert not module._forward_hooks
