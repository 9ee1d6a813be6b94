"""Odds on the digits: the detector sees blind attacks; the pair of tests fails them and passes adaptive ones."""

from __future__ import annotations

import pytest

from tests.casestudies.on_digits import judged, measured

pytestmark = pytest.mark.exhaustive


def test_an_attack_that_ignores_the_detector_fails_and_one_that_knows_it_passes():
    assert measured("odds", 100).present
    weak, right = judged("odds", "weak", 8), judged("odds", "right", 12)
    assert weak["verdict"] == "failed"
    # In the inverted test about half of the samples can be planted in: too few for a verdict, also of 32.
    assert right["verdict"] != "failed"
    assert right["score"] >= 0.95
