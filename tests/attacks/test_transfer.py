import pytest
import torch
from torch import nn

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.base import Attack, AttackTraits, draw_seed
from robust_ext.attacks.transfer import Transfer
from robust_ext.core.random import stream
from robust_ext.core.threat import ThreatModel
from robust_ext.testing.networks import small_batch, small_network
from tests.attacks.problems import Lambda, Recorder, predicted, right_digits, search, target_of

SHAPE = (1, 4, 4)
THREAT = ThreatModel(norm="linf", epsilon=0.15)


class Shift(Attack):
    """Moves all values by a constant; returns NaN for the first row where ``nan``."""

    def __init__(self, by, *, nan=False, norms=("linf", "l2", "l1")):
        self.by, self.nan = by, nan
        self.name = f"Shift({by:g})"
        self.traits = AttackTraits(batching="full", gradients=False, norms=norms)

    def search(self, target, inputs, labels, **_):
        moved = inputs + self.by
        moved[:1, ..., 0] += torch.nan if self.nan else 0
        return moved


def transfer(attack, module, x, y, *, threat_model=THREAT, classes=4):
    target = target_of(module, tuple(x.shape[1:]), classes)
    return attack.run(target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(0))


def problem(count=8, classes=4):
    network, x = small_network(SHAPE, classes), small_batch(count, SHAPE)
    return network, x, network(x).argmax(1)


@pytest.mark.parametrize("epsilon", [0.05, 0.1])
def test_from_the_target_itself_it_is_as_strong_as_apgd(epsilon):
    network, x, y = right_digits(40)
    threat_model = ThreatModel(norm="linf", epsilon=epsilon)
    made = Transfer(surrogates={"itself": network}, steps=20)
    found = transfer(made, network, x, y, threat_model=threat_model, classes=10)
    seed = draw_seed(torch.Generator().manual_seed(0))
    solved = torch.zeros_like(found.found)
    for loss in ("ce", "margin", "targeted-dlr"):
        attack = APGD(steps=20, loss=loss, target_classes=3)
        target, draws = target_of(network, (1, 8, 8), 10), stream(seed, "itself", attack.name)
        points = attack.search(target, x, y, threat_model=threat_model, generator=draws)
        solved |= predicted(network, points) != y
    assert torch.equal(found.found, solved)
    assert torch.equal(found.found, predicted(network, found.candidates) != y)
    assert bool(found.found.any())
    assert bool(threat_model.contains(found.candidates, x).all())


def test_it_beats_apgd_on_a_target_that_masks_its_gradients():
    network, x, y = right_digits(40)
    # The decisions of the network, and no gradient.
    masked = Lambda(lambda x: (network(x) * 4).round() / 4)
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    direct = predicted(masked, search(APGD(steps=20), x, y, threat_model, module=masked, classes=10)[0]) != y
    attack = Transfer(surrogates={"static": network}, steps=20)
    found = transfer(attack, masked, x, y, threat_model=threat_model, classes=10)
    assert int(found.found.sum()) >= int(direct.sum()) + 5
    assert torch.equal(found.found, predicted(masked, found.candidates) != y)


def test_each_row_gets_the_worst_of_its_candidates_and_its_origin():
    network, x, y = problem(24)
    shifts = [Shift(by) for by in (-0.15, -0.07, 0.07, 0.15)]
    other = small_network((1, 4, 4), 4)
    target = Recorder(network)
    found = transfer(Transfer(surrogates={"a": network, "b": other}, attacks=shifts), target, x, y)
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


def test_misclassified_candidates_go_before_others():
    # Cross-entropy ranks the point of an unsure right class above that of a sure wrong one.
    near, far = torch.tensor([[0.0, 0.01, -50, -50], [0.01, 0.0, 0.0, 0.0]])
    two = Lambda(lambda x: torch.where(x.flatten(1)[:, :1] > 0.6, near, far))
    x, y = torch.full((2, *SHAPE), 0.5), torch.zeros(2, dtype=torch.int64)
    made = Transfer(surrogates={"a": small_network(SHAPE, 4)}, attacks=[Shift(0.15), Shift(-0.15)], loss="ce")
    found = transfer(made, two, x, y)
    assert found.origin.tolist() == [0, 0]
    assert bool(found.found.all())


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_points_outside_are_taken_back(norm):
    network, x, y = problem()
    threat_model = ThreatModel(norm=norm, epsilon=0.3)
    target = Recorder(network)
    attack = Transfer(surrogates={"a": network}, attacks=[Shift(0.6, nan=True), Shift(0.01)])
    transfer(attack, target, x, y, threat_model=threat_model)
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


def test_points_without_logits_are_found():
    network, x, y = problem()
    mute, attack = Lambda(lambda x: x.new_full((len(x), 4), torch.nan)), [Shift(0.1)]
    found = transfer(Transfer(surrogates={"a": network}, attacks=attack), mute, x, y)
    torch.testing.assert_close(found.candidates, (x + 0.1).clamp(0, 1))
    assert found.origin.tolist() == [0] * 8
    assert bool(found.found.all() and found.fooled.all())


def test_points_of_a_source_do_not_depend_on_the_others():
    network, x, y = problem()
    other = small_network(SHAPE, 4)
    alone, among = Recorder(network), Recorder(network)
    transfer(Transfer(surrogates={"b": other}, attacks=[APGD(steps=3)]), alone, x, y)
    attacks = [APGD(steps=3, loss="margin"), APGD(steps=3)]
    transfer(Transfer(surrogates={"a": network, "b": other}, attacks=attacks), among, x, y)
    assert torch.equal(alone.batches[0], among.batches[3])
    assert not torch.equal(alone.batches[0], among.batches[1])


def test_surrogates_are_run_in_eval_mode_and_left_as_they_were():
    network, x, y = problem()
    training, first = small_network(SHAPE, 4).train(), APGD(steps=3)
    values = {name: value.clone() for name, value in training.state_dict().items()}
    queried = [Recorder(network), Recorder(network)]
    for module, surrogate in zip(queried, (training, small_network(SHAPE, 4)), strict=True):
        transfer(Transfer(surrogates={"a": surrogate}, attacks=[first]), module, x, y)
    assert torch.equal(queried[0].batches[0], queried[1].batches[0])
    assert all(part.training for part in training.modules())
    assert all(torch.equal(value, values[name]) for name, value in training.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in training.parameters())
