"""Runs survive: interrupted anywhere and started again, they end with the records of an undisturbed run."""

import signal
from unittest.mock import Mock

import pytest

import robust_ext
from robust_ext.core.errors import RunFolderError
from tests.run_folders import records_of

SETTINGS = {"inner_points": 100, "batch_size": 4, "random_inner": 20, "random_corners": 20}
SETTINGS |= {"witness_steps": 4, "witness_queries": 8}


@pytest.fixture
def tested(network, linf):
    def run(attack, inputs, **settings):
        return robust_ext.binarization_test(network, attack, inputs, linf, **{**SETTINGS, **settings})

    return run


# Witnesses that cost little: how many there are is nothing to these tests.
FEW = {"witness_steps": 3, "witness_queries": 4}


def test_an_interrupted_run_goes_on(tmp_path, tested, digits, pgd):
    calls = Mock(return_value=False)

    def fragile(model, x, y, threat_model):
        if calls():
            signal.raise_signal(signal.SIGINT)
        return pgd(steps=3)(model, x, y, threat_model)

    tested(fragile, digits[:12], out=tmp_path / "whole", **FEW)
    total = calls.call_count
    for fail_at in sorted({1, 2, total // 2, total}):
        calls.side_effect = [*[False] * (fail_at - 1), True, *[False] * total]
        folder = tmp_path / f"broken{fail_at}"
        with pytest.raises(KeyboardInterrupt):
            tested(fragile, digits[:12], out=folder, **FEW)
        assert not (folder / "result.json").exists()
        tested(fragile, digits[:12], out=folder, **FEW)
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


def test_other_settings_are_refused(tmp_path, tested, digits, pgd):
    tested(pgd(), digits[:4], out=tmp_path)
    with pytest.raises(RunFolderError, match="inner_points: 100 there, 101 now"):
        tested(pgd(), digits[:4], out=tmp_path, inner_points=101)
    with pytest.raises(RunFolderError, match="inputs"):
        tested(pgd(), digits[4:8], out=tmp_path)


@pytest.mark.parametrize("library", ["foolbox:LinfPGD(steps={})", "art:ProjectedGradientDescent(max_iter={})"])
def test_other_settings_of_an_attack_are_refused(library, tmp_path, tested, digits):
    """Also where its name stays the same."""

    three, again, four = (robust_ext.as_attack(library.format(steps), name="PGD") for steps in (3, 3, 4))
    tested(three, digits[:4], out=tmp_path)
    assert "3" in tested(again, digits[:4], out=tmp_path).attacks["PGD"]["description"]
    with pytest.raises(RunFolderError, match="attacks"):
        tested(four, digits[:4], out=tmp_path)


def test_same_problems_for_every_attack_batch_size_and_order(tested, digits, pgd):
    """What is planted, and what random search makes of it, is decided by seed and sample alone."""

    def of(attack, batch_size, ids):
        result = tested(attack, digits[ids], sample_ids=ids, batch_size=batch_size, random_stops=False)
        return {r["sample"]: (r["separable"], r["random_reach"] > 0.999, r["random_draws"]) for r in result.records}

    ids = list(range(12))
    expected = of(pgd(), 4, ids)
    assert of(pgd(steps=1), 12, ids) == expected
    assert of(lambda model, x, y: x, 5, ids[::-1]) == expected
