import pytest
import torch
from torch import nn

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.random import stream
from robust_ext.core.threat import NORMS, ThreatModel
from robust_ext.testing.networks import small_batch, small_network
from tests.attacks.problems import Lambda, Recorder, predicted, right_digits, search, target_of

SHAPE = (1, 4, 4)


class Shift(Attack):
    """Moves all values by a constant; returns NaN for the first row where ``nan``."""

    def __init__(self, by, *, nan=False):
        self.by, self.nan, self.name = by, nan, f"Shift({by:g})"
        self.traits = AttackTraits(batching="full", gradients=False)

    def search(self, target, inputs, labels, **_):
        moved = inputs + self.by
        moved[:1, ..., 0] += torch.nan if self.nan else 0
        return moved


def transfer(module, x, y, *, norm="linf", epsilon=0.15, classes=4, **chosen):
    target, generator = target_of(module, tuple(x.shape[1:]), classes), torch.Generator().manual_seed(0)
    return Transfer(**chosen).run(
        target, x, y, threat_model=ThreatModel(norm=norm, epsilon=epsilon), generator=generator
    )


def problem(count=8):
    network, x = small_network(SHAPE, 4), small_batch(count, SHAPE)
    return network, x, network(x).argmax(1)


@pytest.mark.parametrize("epsilon", [0.05, 0.1])
def test_from_the_target_itself_it_is_as_strong_as_apgd(epsilon):
    network, x, y = right_digits(40)
    threat_model, target = ThreatModel(norm="linf", epsilon=epsilon), target_of(network, (1, 8, 8), 10)
    found = transfer(network, x, y, epsilon=epsilon, classes=10, surrogates={"itself": network}, steps=20)
    seed = draw_seed(torch.Generator().manual_seed(0))
    solved = torch.zeros_like(found.found)
    for loss in ("ce", "margin", "targeted-dlr"):
        attack = APGD(steps=20, loss=loss, target_classes=3)
        draws = stream(seed, "itself", attack.name)
        solved |= predicted(network, attack.search(target, x, y, threat_model=threat_model, generator=draws)) != y
    assert torch.equal(found.found, solved)
    assert torch.equal(found.found, predicted(network, found.candidates) != y)
    assert bool(found.found.any())
    assert bool(threat_model.contains(found.candidates, x).all())
    # The decisions of the network, and no gradient.
    masked = Lambda(lambda x: (network(x) * 4).round() / 4)
    direct = predicted(masked, search(APGD(steps=20), x, y, threat_model, module=masked, classes=10).out) != y
    found = transfer(masked, x, y, epsilon=epsilon, classes=10, surrogates={"static": network}, steps=20)
    assert int(found.found.sum()) >= int(direct.sum()) + (5 if epsilon == 0.1 else 0)


def test_each_row_gets_the_worst_of_its_candidates_and_its_origin():
    network, x, y = problem(24)
    shifts, target = [Shift(by) for by in (-0.15, -0.07, 0.07, 0.15)], Recorder(network)
    found = transfer(target, x, y, surrogates={"a": network, "b": small_network(SHAPE, 4)}, attacks=shifts)
    assert len(target.batches) == 8
    assert found.sources == tuple((name, shift.name) for name in ("a", "b") for shift in shifts)
    own = nn.functional.one_hot(y, 4).bool()
    logits = torch.stack([network(batch) for batch in target.batches[:4]]).detach()
    gained = logits.masked_fill(own, -torch.inf).amax(2) - logits[:, own]
    values, origin = gained.max(0)
    assert torch.equal(found.origin, origin)
    torch.testing.assert_close(found.losses, values.to(found.losses), rtol=1e-6, atol=1e-5)
    assert torch.equal(found.found, values > 0)
    assert torch.equal(found.candidates, torch.stack(target.batches)[origin, torch.arange(24)])
    assert torch.equal(found.fooled, (gained > 0).repeat(2, 1))
    assert 0 < int((values > 0).sum()) < 24
    assert len(found.origin.unique()) > 1


def test_misclassified_candidates_and_those_without_logits_go_before_others():
    network, x, y = problem()
    # Cross-entropy ranks the point of an unsure right class above that of a sure wrong one.
    near, far = torch.tensor([[0.0, 0.01, -50, -50], [0.01, 0.0, 0.0, 0.0]])
    two = Lambda(lambda x: torch.where(x.flatten(1)[:, :1] > 0.6, near, far))
    given = {"surrogates": {"a": network}, "attacks": [Shift(0.15), Shift(-0.15)], "loss": "ce"}
    found = transfer(two, torch.full_like(x, 0.5), y * 0, **given)
    assert found.origin.tolist() == [0] * 8
    assert bool(found.found.all())
    mute = Lambda(lambda x: x.new_full((len(x), 4), torch.nan))
    found = transfer(mute, x, y, surrogates={"a": network}, attacks=[Shift(0.1)])
    torch.testing.assert_close(found.candidates, (x + 0.1).clamp(0, 1))
    assert bool(found.found.all() and found.fooled.all())


@pytest.mark.parametrize("norm", NORMS)
def test_points_outside_are_taken_back(norm):
    network, x, y = problem()
    threat_model, target = ThreatModel(norm=norm, epsilon=0.3), Recorder(network)
    attacks = [Shift(0.6, nan=True), Shift(0.01)]
    transfer(target, x, y, norm=norm, epsilon=0.3, surrogates={"a": network}, attacks=attacks)
    far, near = target.batches
    assert torch.equal(far[0], x[0])
    for points in (far, near):
        assert bool(torch.isfinite(points).all())
        assert bool(threat_model.contains(points, x).all())
        assert 0 <= float(points.min()) <= float(points.max()) <= 1
    assert float(threat_model.distance(far, x)[1:].min()) > 0.29
    if norm == "linf":
        torch.testing.assert_close(far[1:], (x[1:] + 0.3).clamp(0, 1))
        assert torch.equal(near, (x + 0.01).clamp(0, 1))


def test_points_of_a_source_depend_on_no_other_and_on_no_train_mode():
    network, x, y = problem()
    training = small_network(SHAPE, 4).train()
    values = {name: value.clone() for name, value in training.state_dict().items()}
    first, margin = APGD(steps=3), APGD(steps=3, loss="margin")
    alone, among = Recorder(network), Recorder(network)
    transfer(alone, x, y, surrogates={"b": small_network(SHAPE, 4)}, attacks=[first])
    transfer(among, x, y, surrogates={"a": network, "b": training}, attacks=[margin, first])
    assert torch.equal(alone.batches[0], among.batches[3])
    assert not torch.equal(alone.batches[0], among.batches[1])
    assert all(part.training for part in training.modules())
    assert all(torch.equal(value, values[name]) for name, value in training.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in training.parameters())
