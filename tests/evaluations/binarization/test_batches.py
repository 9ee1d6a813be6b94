"""Rows and batches: functions that depend on their number, rows in any order, and runs that are interrupted."""

import signal
from unittest.mock import Mock

import pytest
import torch

import robust_ext
from robust_ext.attacks.adapted import AdaptedAttack
from robust_ext.attacks.base import Attack, AttackTraits
from robust_ext.core.threat import ThreatModel
from robust_ext.demo.network import digits_network
from robust_ext.evaluations.binarization import binarization_test
from tests.run_folders import records_of

L2 = ThreatModel(norm="l2", epsilon=0.6)


def descent(scaled, *, length=0.003):
    """Steps along what a function makes of gradients of single rows ``(N, ...)``."""

    def attack(model, x, y, epsilon):
        x_adv = x
        for _ in range(30):
            x_adv = x_adv.detach().requires_grad_()
            logits = model(x_adv)
            lead = logits.gather(1, 1 - y[:, None]) - logits.gather(1, y[:, None])
            (gradient,) = torch.autograd.grad(lead.sum(), x_adv)
            moved = x_adv + length * scaled(gradient) - x
            away = moved.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
            x_adv = (x + moved * (epsilon / away).clamp(max=1)).clamp(0, 1)
        return x_adv.detach()

    return attack


def by_row(g):
    return 50 * g / g.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)


def by_number(g):
    return g / len(g)


def steps_of(library, scaled, length=0.003):
    """A user's class of a library."""
    steps = descent(scaled, length=length)
    if library == "foolbox":

        class Mine(pytest.importorskip("foolbox").attacks.L2PGD):
            def run(self, model, inputs, criterion, *, epsilon, **settings):
                return type(inputs)(steps(model, inputs.raw, criterion.labels.raw, epsilon))

        return Mine()
    if library == "torchattacks":

        class Other(pytest.importorskip("torchattacks").PGDL2):
            def forward(self, images, labels):
                return steps(self.get_logits, images, labels, self.eps)

        return Other

    class Third(pytest.importorskip("art.attacks.evasion").FastGradientMethod):
        def generate(self, x, y=None, **settings):
            model, x, y = self.estimator.model, torch.from_numpy(x), torch.from_numpy(y).argmax(1)
            return steps(model, x, y, self.eps).numpy()

    return Third


class Own(Attack):
    """A class of a user's."""

    name, traits = "Own", AttackTraits(batching="full")

    def __init__(self, scaled, length=0.003):
        self.steps = descent(scaled, length=length)

    def search(self, target, inputs, labels, *, threat_model, generator):
        return self.steps(target.module, inputs, labels, threat_model.epsilon)


def seldom(model, x, y, epsilon, generator):
    """Rows that are solved nine times of ten, whatever their number."""
    tried = torch.rand(len(x), generator=generator) < 0.97
    return torch.where(tried.view(-1, 1, 1, 1), descent(by_row)(model, x, y, epsilon), x)


def small_only(model, x, y, epsilon):
    """It works up to eight rows, and there by their number."""
    if len(x) > 8:
        raise ValueError("too many rows")
    return descent(lambda g: g * (1 + 1 / len(g)))(model, x, y, epsilon)


CASES = {
    "the number": (lambda: descent(by_number), True),
    "its square": (lambda: descent(lambda g: g / len(g) ** 2, length=0.02), True),
    "a shared length": (lambda: descent(lambda g: g / g.norm(), length=0.1), True),
    "no scale": (lambda: descent(lambda g: g), False),
    "a length a row": (lambda: descent(by_row), False),
    "a shared length that is enough for all sizes": (lambda: descent(lambda g: 400 * g / g.norm()), False),
    "few rows only": (lambda: small_only, False),
    "by chance": (lambda: seldom, False),
    "a class": (lambda: Own(lambda g: g / g.norm(), length=0.1), True),
    "an adapted class": (lambda: AdaptedAttack(attack=Own(by_number), keep_best=True), True),
    "a sound class": (lambda: Own(lambda g: g), False),
    "Foolbox": (lambda: steps_of("foolbox", by_number), True),
    "ART": (lambda: steps_of("art", lambda g: g / g.norm(), length=0.06), True),
    "torchattacks": (lambda: steps_of("torchattacks", by_number), True),
    "a sound one of ART": (lambda: steps_of("art", by_row), False),
    "a random one": (lambda: steps_of("torchattacks", lambda g: g * (0.5 + torch.rand(len(g), 1, 1, 1))), False),
    "Foolbox's own": (lambda: "foolbox:LinfPGD(steps=30)", False),
    "ART's own": (lambda: "art:ProjectedGradientDescent(max_iter=30, batch_size=1)", False),
}


@pytest.mark.parametrize("name", CASES)
def test_who_depends_on_the_batch(name, digits):
    make, found = CASES[name]
    made, options = make(), {"batch_size": 8, "depths": (1,), "inner_points": 100, "canaries": 0}
    ball = ThreatModel(norm="linf", epsilon=0.1) if isinstance(made, str) else L2
    result = binarization_test(digits_network(), made, digits[:16], ball, **options)
    assert result.content["attacks"][0]["score"] >= 0.8
    assert [one["code"] for one in result.content["findings"]] == ["batch_size_matters"] * found


pytest.importorskip("art")


pytest.importorskip("foolbox")


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


SETTINGS = {"inner_points": 100, "batch_size": 4, "random_inner": 20, "random_corners": 20}


SETTINGS |= {"witness_steps": 3, "witness_queries": 4}


@pytest.fixture
def tested(network, linf):
    def run(attack, inputs, **settings):
        return robust_ext.binarization_test(network, attack, inputs, linf, **{**SETTINGS, **settings})

    return run


def test_an_interrupted_run_goes_on(tmp_path, tested, digits, pgd):
    calls = Mock(return_value=False)

    def fragile(model, x, y, threat_model):
        if calls():
            signal.raise_signal(signal.SIGINT)
        return pgd(steps=3)(model, x, y, threat_model)

    tested(fragile, digits[:12], out=tmp_path / "whole")
    total = calls.call_count
    for fail_at in sorted({1, 2, total // 2, total}):
        calls.side_effect = [*[False] * (fail_at - 1), True, *[False] * total]
        folder = tmp_path / f"broken{fail_at}"
        with pytest.raises(KeyboardInterrupt):
            tested(fragile, digits[:12], out=folder)
        assert not (folder / "result.json").exists()
        tested(fragile, digits[:12], out=folder)
        assert records_of(folder) == records_of(tmp_path / "whole")


def test_a_finished_run_is_not_run_again(tmp_path, tested, digits, pgd):
    calls = Mock()

    def attack(model, x, y, threat_model):
        calls()
        return pgd()(model, x, y, threat_model)

    first = tested(attack, digits[:8], out=tmp_path)
    calls.reset_mock()
    second = tested(attack, digits[:8], out=tmp_path)
    calls.assert_not_called()
    assert first == second
    assert robust_ext.load_result(tmp_path) == first


def test_same_problems_for_every_attack_batch_size_and_order(tested, digits, pgd):
    """What is planted, and what random search makes of it, is decided by seed and sample alone."""

    def of(attack, batch_size, ids):
        result = tested(attack, digits[ids], sample_ids=ids, batch_size=batch_size, random_stops=False)
        return {r["sample"]: (r["separable"], r["random_reach"] > 0.999, r["random_draws"]) for r in result.records}

    ids = list(range(12))
    expected = of(pgd(), 4, ids)
    assert of(pgd(steps=1), 12, ids) == expected
    assert of(lambda model, x, y: x, 5, ids[::-1]) == expected
