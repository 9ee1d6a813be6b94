"""The tables of docs/scaling.md are computed, and what it states beside them holds."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("needs the repository", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))

import scaling  # noqa: E402
import unit_costs  # noqa: E402

PAGE = ROOT / "docs" / "scaling.md"
UNIT = json.loads((ROOT / "docs" / "unit_costs.json").read_text(encoding="utf-8"))
ACCURACY, BARE, PLANTED = scaling.PLANS


def test_the_page_is_computed_from_the_unit_costs():
    page = PAGE.read_text(encoding="utf-8")
    assert scaling.filled(page, UNIT) == page
    assert page.count(scaling.BEGIN) == page.count(scaling.END) == 2


def test_sums_are_those_of_a_loop():
    plan = replace(ACCURACY, attacks=3, samples=8, block=4, values=5, steps=7, workers=2, parameters=10)
    planted = replace(plan, together=True, planting=11)
    calls = forward = both = sent = size = 0
    for _attack in range(plan.attacks):
        for _block in range(2):
            calls += 1
            for _sample in range(plan.block):
                forward, both, sent, size = forward + 1, both + 7, sent + 5 * 4, size + UNIT["record_bytes"]
    assert scaling.passes(plan) == (forward, both)
    assert scaling.passes(planted) == (forward + 8 * 11, both)
    moved = scaling.traffic(plan, UNIT)
    assert (moved["inputs"], moved["candidates"], moved["records"]) == (sent, sent, size)
    assert moved["network"] == 2 * 10 * UNIT["bytes_parameter"]
    assert scaling.files(plan, UNIT)["arrays"] == calls
    # A block of the binarization test goes to a worker once, for all attacks.
    assert scaling.traffic(planted, UNIT)["inputs"] == sent / 3
    assert scaling.parent_seconds(plan, UNIT)["calls"] == calls * UNIT["call_seconds"]


@pytest.mark.parametrize("name", ["samples", "attacks"])
def test_nothing_grows_faster_than_the_work(name):
    for plan in scaling.PLANS:
        twice = replace(plan, **{name: 2 * getattr(plan, name)})
        once, again = (sum(scaling.parent_seconds(one, UNIT).values()) for one in (plan, twice))
        assert again <= 2 * once


@pytest.mark.exhaustive
def test_unit_costs_are_measured():
    found = unit_costs.measured(records=128, calls=3)
    assert set(found) == set(UNIT)
    assert all(value > 0 for value in found.values())
    # Counts do not depend on the machine.
    for name in ("record_bytes", "planted_attack_bytes", "planted_sample_bytes", "bytes_parameter", "kept_share"):
        assert found[name] == pytest.approx(UNIT[name], rel=0.1), name
