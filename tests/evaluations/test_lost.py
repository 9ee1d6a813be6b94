"""Samples whose attack's process ended or timed out: not found, counted apart, warned about, numbers upper bounds."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from robust_ext import ThreatModel, binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.task import run_task

THREAT = ThreatModel(norm="linf", epsilon=0.2)
APGD = "robust_ext:APGD(steps=20)"
WORDS = {"ended": "the attack's process ended: exit status 0", "timed_out": "the attack was stopped after 3 seconds"}


@pytest.fixture(scope="module")
def subject():
    network, dataset = digits_network(), load_dataset("digits")
    inputs, labels = dataset.take(dataset.choose(48, seed=1))
    with torch.no_grad():
        right = network(inputs).argmax(1) == labels
    return network, inputs[right][:40], labels[right][:40]


@pytest.fixture(params=WORDS)
def lost(request, monkeypatch):
    """The outcome of every second batch, whose worker returns nothing."""
    calls = []

    def worker(task):
        result = run_task(task)
        calls.append(task)
        if len(calls) % 2:
            return result
        return replace(result, candidates=None, witnesses=None, lost=(request.param, WORDS[request.param]))

    @contextmanager
    def workers(**_settings):
        yield worker

    monkeypatch.setattr("robust_ext.evaluations.run_keywords.attack_worker", workers)
    return request.param


def test_robust_accuracy_is_an_upper_bound(subject, lost):
    network, inputs, labels = subject
    result = robust_accuracy(network, {"APGD": APGD}, inputs, labels, THREAT, batch_size=10)
    (row,) = result.content["worst_case"]
    found = result.attacks["APGD"]["outcomes"]
    assert (found[lost], row["not_attacked"], row["non_finite"]) == (20, 20, 0)
    assert row["robust_accuracy"] == 1 - found["found"] / 40 >= 0.5
    assert result.content["warnings"][0].startswith(f"APGD: 20 of 40 samples: {WORDS[lost]}.")
    assert f"≤ {100 * row['robust_accuracy']:.1f}" in str(result)


def test_what_another_attack_breaks_is_broken(subject, lost):
    network, inputs, labels = subject
    attacks = {"APGD": APGD, "again": APGD}
    result = robust_accuracy(network, attacks, inputs, labels, THREAT, batch_size=40)
    (row,) = result.content["worst_case"]
    assert result.attacks["again"]["outcomes"] == {lost: 40}
    assert result.attacks["again"]["robust_accuracy"][0]["not_attacked"] == 40
    assert row["not_attacked"] == 40 - result.attacks["APGD"]["outcomes"]["found"] == round(40 * row["robust_accuracy"])


def test_mead_counts_no_success_and_marks_what_it_states(subject, lost):
    network, inputs, labels = subject
    detectors = {"spread": lambda x: x.flatten(1).std(1)}
    result = mead(network, [APGD], inputs, labels, THREAT, detectors=detectors, batch_size=10, resamples=0)
    (arm,), (row,) = result.content["arms"], result.detectors["spread"]["results"]
    assert (arm["outcomes"][lost], row["not_attacked"]) == (20, 20)
    assert arm["successes"] == arm["outcomes"]["found"] == row["positives"] <= 20


def test_test_time_defenses_stand_as_they_are(subject, lost):
    network, inputs, labels = subject
    result = evaluate_defense(lambda x: x, APGD, inputs, labels, THREAT, classifier=network, batch_size=10)
    for side in ("static", "defended"):
        worst, (attack,) = result.content[side]["worst_case"], result.content[side]["attacks"]
        assert attack["outcomes"][lost] == worst["not_attacked"] == attack["not_attacked"] == 20
        assert worst["robust_accuracy"] >= 0.5


def test_the_binarization_test_says_what_was_not_attacked(subject, lost):
    network, inputs, _ = subject
    settings = {"inner_points": 50, "batch_size": 10, "canaries": 0}
    result = binarization_test(network, {"APGD": APGD}, inputs, ThreatModel(norm="linf", epsilon=0.1), **settings)
    attack = result.attacks["APGD"]
    assert attack["outcomes"][lost] == attack["samples"] - attack["outcomes"]["found"] == 20
    assert result.verdict == "failed"
    assert f"20 of 40 problems: {WORDS[lost]}" in attack["reason"]
