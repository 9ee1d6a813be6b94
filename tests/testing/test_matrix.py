"""The matrix sees what goes wrong; every attack becomes in it what docs/attacks.md and docs/attacks_art.md state."""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from robust_ext.attacks.base import AttackTraits, CallableAttack
from robust_ext.core.errors import AttackRefusedError, InvalidArgumentError, MissingDependencyError
from robust_ext.registry.base import Adapter, AttackListing, adapters
from robust_ext.reports.conformance import matrix_page
from robust_ext.testing.conformance import TARGETS, conformance, conformance_row
from robust_ext.testing.networks import digits


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
    def one(name, target="binarized", batching="full", reason="", **traits):
        listing = AttackListing(name=name, traits=AttackTraits(batching=batching, **traits), reason=reason)
        monkeypatch.setattr("robust_ext.testing.conformance.adapters", lambda: {"fake": Fake(listing)})
        return conformance_row("fake", listing, target)

    return one


@pytest.mark.parametrize("batching", ["full", "any", "single"])
def test_what_runs_is_verified_and_counted(run, batching):
    row = run("pgd", batching=batching, norms=("linf", "l2") if batching == "any" else ("linf",))
    assert (row.outcome, row.reason, row.norm, row.samples, row.verified) == ("ran", "", "linf", 4, 4)
    assert row.one_by_one == ("" if batching == "single" else "same")
    # Twenty steps on four rows; the planted points were made before.
    assert row.passes == {"forward": 80, "backward": 80}
    assert run("nothing").verified == 0
    # The ordinary classifier has ten classes and true labels.
    row = run("pgd", "classifier")
    assert (row.outcome, row.samples) == ("ran", 4)
    assert row.verified > 0
    assert int(digits(1)[1].max()) > 1


@pytest.mark.parametrize(
    ("name", "batching", "words"),
    [
        ("shuffled", "full", "belongs to another"),
        ("half_way", "any", "as close to two inputs"),
        # The same attacks, rightly described.
        ("shuffled", "any", None),
        ("half_way", "single", None),
        ("broken", "full", "not today"),
        ("picky", "full", "attack: got picky, expected something else"),
    ],
)
def test_errors_and_rows_that_are_treated_otherwise_than_said_fail(run, name, batching, words):
    row = run(name, batching=batching)
    assert row.outcome == ("ran" if words is None else "failed")
    assert (words or "") in row.reason


def test_refusals_come_before_any_work(run):
    for name, words, options in (
        ("anything", "made for tables", {"reason": "it is made for tables; use pgd"}),
        ("reluctant", "no; use pgd", {}),
        ("pgd", "no_such_package", {"packages": ("no_such_package",)}),
    ):
        row = run(name, **options)
        assert (row.outcome, row.passes["forward"], words in row.reason) == ("refused", 0, True)


def test_workers_find_the_same_rows_and_outlive_an_attack_that_does_not(monkeypatch):
    listings = [AttackListing(name=name, traits=AttackTraits(batching="full")) for name in ("pgd", "half_way")]
    monkeypatch.setattr("robust_ext.testing.conformance.adapters", lambda: {"fake": Fake(*listings)})
    # Processes that are forked have the stand-in for a library too.
    forked, seen = partial(ProcessPoolExecutor, 2, mp_context=get_context("fork")), []

    def rows(**options):
        return [replace(row, seconds=0.0) for row in conformance(**options)]

    pooled = rows(executor=forked, progress=lambda row, total: seen.append((row is None, total)))
    assert pooled == rows()
    assert seen == [(True, 4), *[(False, 4)] * 4]
    listings.insert(1, AttackListing(name="deadly", traits=AttackTraits(batching="full")))
    found = rows(executor=forked)
    assert [row.outcome for row in found] == ["ran", "ran", "failed", "failed", "ran", "ran"]
    assert all("it ended its process (BrokenProcessPool" in row.reason for row in found[2:4])
    assert [*found[:2], *found[4:]] == pooled


PAGES = {"attacks.md": ("foolbox", "robust_ext", "torchattacks"), "attacks_art.md": ("adv_lib", "art")}
TEXTS = {name: (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8") for name in PAGES}
LIBRARIES = tuple(sorted(library for libraries in PAGES.values() for library in libraries))


def listings(library):
    try:
        return adapters()[library].list_attacks()
    except MissingDependencyError:
        return []


def documented():
    cells, library = {}, ""
    for line in "\n".join(TEXTS.values()).splitlines():
        if line.startswith("## "):
            library = line[3:]
        elif line.startswith("| ") and not line.startswith("| attack |"):
            row = [cell.strip() for cell in line.strip("|").split(" | ")]
            for target, cell in zip(TARGETS, row[6:8], strict=True):
                cells[library, row[0].split(" / ")[0], target] = cell
    return cells


LISTED = {library: listings(library) for library in LIBRARIES}
CELLS = documented()
OUTCOMES = {key: "ran" if "/" in cell else cell for key, cell in CELLS.items()}
CASES = [
    pytest.param(library, listing, target, id=f"{library}:{listing.name}-{target}")
    for library in LIBRARIES
    for listing in LISTED[library]
    for target in TARGETS
]


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_what_the_command_writes(name):
    missing = [library for library in PAGES[name] if not LISTED[library]]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    assert matrix_page({library: LISTED[library] for library in PAGES[name]}, CELLS) == TEXTS[name]


@pytest.mark.usefixtures("uncompiled_brendel_bethge")
@pytest.mark.exhaustive
@pytest.mark.parametrize(("library", "listing", "target"), CASES)
def test_it_becomes_what_the_page_says(library, listing, target):
    if "torchvision" in listing.traits.packages:
        # Whatever the page says, it depends on the torch beside it, and on what other tests have declared.
        pytest.skip("whether torchvision can be imported is not a matter of the attack")
    if library == "foolbox" and listing.name.endswith("BrendelBethgeAttack"):
        # Its optimizer is run in Python here, which takes a hundred times as long.
        listing = replace(listing, trial={"steps": 8})
    row = conformance_row(library, listing, target)
    assert row.outcome == OUTCOMES[library, listing.name, target], row.reason
    # Machines round otherwise, and some attacks stop at the clock; but what finds all here finds something there.
    assert row.verified > 0 or CELLS[library, listing.name, target] != "4/4"
    # L1FMN sorts values to project them; what float32 rounds otherwise in a smaller batch ends elsewhere.
    alone = not listing.traits.batch_dependent and listing.name != "L1FMNAttack"
    if row.outcome == "ran" and alone and listing.traits.seeds == "none":
        assert row.one_by_one in ("", "same")
