"""The matrix sees what goes wrong: attacks made for that are run in it."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

import pytest
import torch

from robust_ext.attacks.base import AttackTraits, CallableAttack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, MissingDependencyError
from robust_ext.registry.base import Adapter, AttackListing
from robust_ext.reports.conformance import matrix_page
from robust_ext.testing.conformance import TARGETS, BatchMonitor, conformance, conformance_row
from robust_ext.testing.networks import digits, planted, threat_model


def pgd(model, x, y, threat_model):
    adversarial = x.clone()
    for _ in range(20):
        adversarial.requires_grad_()
        loss = torch.nn.functional.cross_entropy(model(adversarial), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, adversarial)
        adversarial = adversarial.detach() + threat_model.epsilon / 5 * gradient.sign()
        adversarial = (x + (adversarial - x).clamp(-threat_model.epsilon, threat_model.epsilon)).clamp(0, 1)
    return adversarial


def nothing(model, x, y):
    model(x)
    return x


def shuffled(model, x, y, threat_model):
    order = torch.arange(len(x)).roll(1)
    return pgd(model, x[order], y[order], threat_model)[order.argsort()]


def half_way(model, x, y):
    model((x + x.roll(1, 0)) / 2)
    return x


def broken(model, x, y):
    raise ValueError("not today")


def deadly(model, x, y):
    os._exit(3)


FUNCTIONS = {function.__name__: function for function in (pgd, nothing, shuffled, half_way, broken, deadly)}


class Fake(Adapter):
    name = "fake"

    def __init__(self, *listings):
        self.listings = list(listings)

    def list_attacks(self):
        if not self.listings:
            raise MissingDependencyError("fake is not installed")
        return self.listings

    def build_attack(self, attack, settings, *, name):
        if attack == "picky":
            raise InvalidArgumentError("attack", "picky", "something else")
        if attack == "reluctant":
            raise AttackRefusedError("no; use pgd")
        built = CallableAttack(FUNCTIONS[attack], name=name)
        built.traits = next(one.traits for one in self.listings if one.name == attack)
        return built


@pytest.fixture
def run(monkeypatch):
    def one(name, target="binarized", **listed):
        listing = AttackListing(name=name, **listed)
        monkeypatch.setattr("robust_ext.testing.conformance.adapters", lambda: {"fake": Fake(listing)})
        return conformance_row("fake", listing, target)

    return one


def ordered(**more):
    return AttackTraits(batching="full", **more)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_problems_can_be_solved(norm, channels):
    problems = planted(norm, channels)
    assert len(problems) == 4
    assert problems.score(problems.planted[:, 0]) == 1
    assert problems.inputs.shape == (4, channels, 8, 8)
    assert problems.settings.threat_model == threat_model(norm, channels)


@pytest.mark.parametrize(("rows", "norms"), [("full", ("linf",)), ("any", ("linf", "l2")), ("single", ("linf",))])
def test_what_runs_is_verified_and_counted(run, rows, norms):
    row = run("pgd", traits=AttackTraits(batching=rows, norms=norms))
    assert (row.outcome, row.reason, row.norm, row.samples, row.verified) == ("ran", "", "linf", 4, 4)
    assert row.one_by_one == ("" if rows == "single" else "same")
    # Twenty steps on four rows; the planted points were made before.
    assert row.passes == {"forward": 80, "backward": 80}
    assert row.seconds > 0
    assert run("nothing", traits=ordered()).verified == 0


def test_the_ordinary_classifier_has_ten_classes_and_true_labels(run):
    row = run("pgd", "classifier", traits=ordered())
    _, labels = digits(1)
    assert (row.target, row.outcome, row.samples) == ("classifier", "ran", 4)
    assert row.verified > 0
    assert int(labels.max()) > 1


def test_rows_that_are_treated_otherwise_than_said_fail(run):
    row = run("shuffled", traits=ordered())
    assert row.outcome == "failed"
    assert "belongs to another" in row.reason
    # The same attack, rightly described.
    assert run("shuffled", traits=AttackTraits(batching="any")).outcome == "ran"
    row = run("half_way", traits=AttackTraits(batching="any"))
    assert row.outcome == "failed"
    assert "as close to two inputs" in row.reason
    assert run("half_way", traits=AttackTraits(batching="single")).outcome == "ran"


def test_what_raises_fails_with_its_error(run):
    row = run("broken", traits=ordered())
    assert (row.outcome, row.verified) == ("failed", 0)
    assert "not today" in row.reason
    row = run("picky")
    assert (row.outcome, row.reason) == ("failed", "attack: got picky, expected something else")


def test_refusals_come_before_any_work(run):
    row = run("anything", reason="it is made for tables; use pgd")
    assert (row.outcome, row.reason) == ("refused", "it is made for tables; use pgd")
    assert run("reluctant").reason == "no; use pgd"
    row = run("pgd", traits=ordered(packages=("no_such_package",)))
    assert (row.outcome, row.passes["forward"]) == ("refused", 0)
    assert "no_such_package" in row.reason


def test_workers_find_the_same_rows_and_outlive_an_attack_that_does_not(monkeypatch):
    listings = [AttackListing(name=name, traits=ordered()) for name in ("pgd", "half_way")]
    monkeypatch.setattr("robust_ext.testing.conformance.adapters", lambda: {"fake": Fake(*listings)})
    # Processes that are forked have the stand-in for a library too.
    forked, seen = partial(ProcessPoolExecutor, 2, mp_context=get_context("fork")), []
    pooled = conformance(executor=forked, progress=lambda row, total: seen.append((row, total)))
    assert [replace(row, seconds=0.0) for row in pooled] == [replace(row, seconds=0.0) for row in conformance()]
    assert seen[0] == (None, 4)
    assert {id(row) for row, _ in seen[1:]} == set(map(id, pooled))
    listings.insert(1, AttackListing(name="deadly", traits=ordered()))
    found = conformance(executor=forked)
    assert [row.outcome for row in found] == ["ran", "ran", "failed", "failed", "ran", "ran"]
    assert all("it ended its process (BrokenProcessPool" in row.reason for row in found[2:4])
    assert [replace(row, seconds=0.0) for row in (*found[:2], *found[4:])] == [
        replace(row, seconds=0.0) for row in pooled
    ]


def test_remarks_say_why_an_attack_that_could_run_was_refused():
    refused = {("fake", name, target): "refused" for name in ("aware", "picky") for target in TARGETS}
    listings = [
        AttackListing(name="aware", traits=AttackTraits(detector=True)),
        AttackListing(name="picky", traits=AttackTraits(packages=("cv9",)), defect="slow"),
    ]
    lines = matrix_page({"fake": listings}, refused).splitlines()[-2:]
    assert lines[0].endswith("| refused | refused | these targets have no detector |")
    assert lines[1].endswith("| refused | refused | cv9 was not installed when this page was written |")


def test_what_finds_nothing_is_explained_where_it_finds_nothing():
    listings = [
        AttackListing(name="plain", misses="it tries one point", defect="slow."),
        AttackListing(name="moves", traits=AttackTraits(normless=True)),
    ]
    cells = {("fake", one.name, target): "0/4" for one in listings for target in TARGETS}
    lines = matrix_page({"fake": listings}, {**cells, ("fake", "plain", "classifier"): "1/4"}).splitlines()[-2:]
    assert lines[0].endswith("| 0/4 | 1/4 | slow; it tries one point |")
    assert lines[1].endswith("| 0/4 | 0/4 | no norm limits what it changes |")
    lines = matrix_page({"fake": listings}, dict.fromkeys(cells, "2/4")).splitlines()[-2:]
    assert lines[0].endswith("| 2/4 | 2/4 | slow |")
    assert lines[1].endswith("| 2/4 | 2/4 |  |")


def test_single_rows_are_never_out_of_order():
    watched = BatchMonitor(torch.nn.Flatten(), torch.zeros(1, 2), batching="full", norm="l2")
    watched(torch.ones(7, 2))
    watched(torch.ones(0, 2))
    assert not watched.violations
