"""Attacked together or one at a time: the same verdict, for attacks that treat rows in every way."""

import pytest
import torch

import robust_ext
from robust_ext.attacks.base import AttackTraits

pytest.importorskip("art")
pytest.importorskip("foolbox")

ATTACKS = {
    "foolbox PGD": ("foolbox:LinfPGD(steps=20, random_start=False)", "linf"),
    "ART PGD": ("art:ProjectedGradientDescent(max_iter=20)", "linf"),
    "ART APGD": ("art:AutoProjectedGradientDescent(max_iter=20, nb_random_init=1)", "linf"),
    "foolbox C&W": ("foolbox:L2CarliniWagnerAttack(steps=60, binary_search_steps=3, stepsize=0.02)", "l2"),
    "ART C&W": ("art:CarliniL2Method(max_iter=10, binary_search_steps=2)", "l2"),
    "foolbox DeepFool": ("foolbox:L2DeepFoolAttack()", "l2"),
    "ART DeepFool": ("art:DeepFool(max_iter=50, epsilon=0.02)", "l2"),
    "ART Square": ("art:SquareAttack(max_iter=1000)", "linf"),
    "ART HopSkipJump": ("art:HopSkipJump(max_iter=4, max_eval=200, init_eval=10)", "linf"),
    "foolbox HopSkipJump": ("foolbox:HopSkipJumpAttack(steps=4, max_gradient_eval_steps=200)", "l2"),
}
# Of each way to treat rows one that is fast.
QUICK = {"foolbox PGD", "ART APGD", "ART DeepFool"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in ATTACKS]
)
def test_same_verdict_together_and_alone(name, network, digits):
    text, norm = ATTACKS[name]
    threat_model = robust_ext.ThreatModel(norm=norm, epsilon=0.1 if norm == "linf" else 0.8)
    settings = {"inner_points": 100, "canaries": 0, "random_inner": 20, "random_corners": 20, "depths": (1,)}
    attack = robust_ext.as_attack(text)
    together = robust_ext.binarization_test(network, attack, digits[:6], threat_model, **settings)
    alone, traits = robust_ext.as_attack(text), attack.traits
    kept = {"minimum_norm": traits.minimum_norm, "norms": traits.norms, "gradients": traits.gradients}
    alone.traits = AttackTraits(batching="single", **kept)
    singly = robust_ext.binarization_test(network, alone, digits[:6], threat_model, **settings)
    first, second = together.attacks[text], singly.attacks[text]
    assert first["random_score"] == second["random_score"]
    assert first["verdict"] == second["verdict"]
    # Attacks that draw or stop for the batch as a whole may differ on single samples, not on the whole.
    assert abs(first["score"] - second["score"]) <= 0.2


@pytest.mark.parametrize("shape", ["subset", "permuted", "repeated"])
def test_attacks_that_reshuffle_rows_meet_the_right_readouts(shape, network, digits, linf, pgd):
    """Whatever rows an attack asks about together, its result is that of asking in order."""

    def shuffling(model, x, y, threat_model):
        if shape == "subset":
            parts = zip(x.split(3), y.split(3), strict=True)
            return torch.cat([pgd()(model, part, label, threat_model) for part, label in parts])
        order = torch.arange(len(x)).flip(0)
        if shape == "repeated":
            order = order.repeat_interleave(3)
        moved = pgd()(model, x[order], y[order], threat_model)
        return moved[::3].flip(0) if shape == "repeated" else moved.flip(0)

    attacks = {"in order": pgd(), "shuffled": shuffling}
    result = robust_ext.binarization_test(
        network, attacks, digits[:16], linf, inner_points=100, canaries=0, depths=(1,)
    )
    assert result.attacks["in order"]["score"] == 1.0
    for record in result.records:
        entries = record["attacks"]
        assert entries["shuffled"]["outcome"] == entries["in order"]["outcome"]
        assert entries["shuffled"]["reach"] == pytest.approx(entries["in order"]["reach"], rel=1e-3, abs=1e-3)


def test_twins_are_attacked_one_at_a_time(network, digits, linf, pgd):
    """Two samples with the same pixels cannot be told apart in a batch; each still meets its own readout."""
    twins = torch.cat([digits[:4], digits[:4]])
    sizes = []

    def attack(model, x, y, threat_model):
        sizes.append(len(x))
        return pgd()(model, x, y, threat_model)

    result = robust_ext.binarization_test(network, attack, twins, linf, inner_points=100, canaries=0, depths=(1,))
    assert sizes == [1] * 8
    assert result.score == 1.0
