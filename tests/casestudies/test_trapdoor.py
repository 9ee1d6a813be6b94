"""Trapdoor on the digits: the detector sees blind attacks; the pair of tests fails them and passes adaptive ones."""

from __future__ import annotations

import pytest

from tests.casestudies.on_digits import judged, measured

pytestmark = pytest.mark.exhaustive


def test_an_attack_that_ignores_the_detector_fails_and_one_that_knows_it_passes():
    assert measured("trapdoor").present
    weak, right = judged("trapdoor", "weak", 48), judged("trapdoor", "right", 48)
    assert weak["verdict"] == "failed"
    assert right["verdict"] == "passed"
    assert all(part["random_score"] <= 0.2 for part in right["tests"].values())
