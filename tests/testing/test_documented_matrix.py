"""Every attack of every library is built and run, and becomes what docs/attacks.md and docs/attacks_art.md state."""

from dataclasses import replace
from pathlib import Path

import pytest

from robust_ext.core.errors import MissingDependencyError
from robust_ext.registry.base import adapters
from robust_ext.reports.conformance import matrix_page
from robust_ext.testing.conformance import TARGETS, conformance_row

PAGES = {"attacks.md": ("foolbox", "robust_ext", "torchattacks"), "attacks_art.md": ("adv_lib", "art")}
TEXTS = {name: (Path(__file__).parents[2] / "docs" / name).read_text(encoding="utf-8") for name in PAGES}
LIBRARIES = tuple(sorted(library for libraries in PAGES.values() for library in libraries))


def listings(library):
    try:
        return adapters()[library].list_attacks()
    except MissingDependencyError:
        return []


def documented():
    cells = {}
    library = ""
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


@pytest.mark.parametrize("library", LIBRARIES)
def test_nearly_all_run(library):
    for target in TARGETS:
        outcomes = [outcome for (name, _, met), outcome in OUTCOMES.items() if (name, met) == (library, target)]
        assert set(outcomes) <= {"ran", "refused"}
        # What ART has for other tasks than classifying images, adv-lib for dense predictions; and what asks for
        # torchvision, which cannot be installed beside every build of torch. Of ours, what needs a detector.
        elsewhere = {"art": 17, "adv_lib": 5, "robust_ext": 5}.get(library, 0)
        assert outcomes.count("ran") >= 0.95 * (len(outcomes) - elsewhere)


@pytest.mark.parametrize("target", TARGETS)
def test_nearly_all_find_something_and_the_others_are_explained(target):
    listed = {(library, one.name): one for library in LIBRARIES for one in LISTED[library]}
    found = {key[:2]: int(cell[0]) for key, cell in CELLS.items() if key[2] == target and "/" in cell}
    nothing = [listed[key] for key, count in found.items() if not count and key in listed]
    assert [one.name for one in nothing if not one.misses and not one.traits.normless] == []
    assert len(nothing) <= 0.12 * len(found)
    # Descent along a gradient in the ball finds something on every sample.
    descent = {key: count for key, count in found.items() if "ProjectedGradientDescent" in key[1] or key[1] == "PGD"}
    assert len(descent) >= 8
    assert set(descent.values()) == {4}


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
    if CELLS[library, listing.name, target] == "4/4":
        assert row.verified > 0
    # L1FMN sorts values to project them; what float32 rounds otherwise in a smaller batch ends elsewhere.
    alone = not listing.traits.batch_dependent and listing.name != "L1FMNAttack"
    if row.outcome == "ran" and alone and listing.traits.seeds == "none":
        assert row.one_by_one in ("", "same")
