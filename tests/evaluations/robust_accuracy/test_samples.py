"""What each attack did to each sample: success rates, who found it, over queries, the nearest examples."""

import numpy as np
import pytest
import torch

from robust_ext import ThreatModel, load_result, robust_accuracy
from tests.evaluations.small import INPUTS, LABELS, LINF, NETWORK, sign_step

EPSILONS = [0.02, 0.1, 0.2]
WRONG = LABELS.clone()
WRONG[0] = (LABELS[0] + 1) % 3
ATTACKS = {
    "square": "robust_ext:Square(queries=60)",
    "apgd": "robust_ext:APGD(steps=10)",
    "search": "robust_ext:BoundarySearch(budget=200)",
}


@pytest.fixture(scope="module")
def result():
    settings = {"epsilons": EPSILONS, "keep_candidates": True, "batch_size": 4}
    return robust_accuracy(NETWORK, ATTACKS, INPUTS, WRONG, LINF, **settings)


def test_success_is_counted_among_samples_that_are_right(result):
    for row in result.rows():
        broken = 9 - round(10 * row["robust_accuracy"])
        assert row["success_rate"] == pytest.approx(broken / 9)
    rate = result.success_rate(0.1)
    assert rate == pytest.approx(1 - result.robust_accuracy(0.1) / 0.9)
    assert f"{100 * rate:.1f} at 0.1" in str(result)
    assert result.success_rate(0.1, attack="apgd") <= rate


def test_who_found_each_example(result):
    for epsilon in EPSILONS:
        found = result.found_by(epsilon)
        robust = result.content["worst_case"][EPSILONS.index(epsilon)]["robust"]
        # The first sample is misclassified as it is, and found by nobody.
        assert sorted(found) == [place for place, one in enumerate(robust) if one == "0" and place]
        for name in ATTACKS:
            robust = result.attacks[name]["robust_accuracy"][EPSILONS.index(epsilon)]["robust"]
            mine = [place for place, one in enumerate(robust) if one == "0" and place]
            assert mine == [place for place, names in found.items() if name in names]


def test_the_nearest_examples(result):
    candidates = torch.from_numpy(result.candidates)
    far = (candidates - INPUTS).abs().flatten(1).amax(1)
    wrong = NETWORK(candidates).argmax(1) != WRONG
    nearest = {}
    for row in result.records:
        if row["broken_at"] is not None or (row["correct"] and row["outcome"] == "found"):
            nearest[row["index"]] = min(row["distance"], nearest.get(row["index"], np.inf))
    assert set(nearest) == {place for place in range(1, 10) if wrong[place]}
    for place in range(10):
        assert far[place].item() == pytest.approx(nearest.get(place, 0), abs=1e-6)


def test_over_queries_by_counting(result):
    """Square by itself, its queries recounted from the outside."""
    seen = {}

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = NETWORK

        def forward(self, x):
            return self.network(x)

    for queries, robust in result.over_queries("square", 0.1)[1:]:
        again = robust_accuracy(
            NETWORK,
            {"square": f"robust_ext:Square(queries={queries}, schedule=60)"},
            INPUTS,
            WRONG,
            ThreatModel(norm="linf", epsilon=0.1),
            batch_size=4,
        )
        seen[queries] = again.robust_accuracy(0.1)
        assert robust == pytest.approx(seen[queries])
    assert result.over_queries("square", 0.1)[0] == (0, 0.9)
    assert len(seen) > 1
    with pytest.raises(KeyError):
        result.over_queries("search", 0.1)


def test_a_point_that_was_never_queried():
    """A function that returns what it did not query counts at the end of its queries."""
    result = robust_accuracy(NETWORK, sign_step, INPUTS, LABELS, ThreatModel(norm="linf", epsilon=0.3))
    points = result.over_queries("sign_step", 0.3)
    assert [queries for queries, _ in points] == [0, 1]
    assert points[-1][1] == pytest.approx(result.robust_accuracy(0.3))


def test_a_frame_and_a_loaded_result(result, tmp_path):
    pytest.importorskip("pandas")
    frame = result.sample_frame()
    # Two attacks at three budgets, one for all of them.
    assert len(frame) == 10 * (2 * 3 + 1)
    right = frame[frame["correct"] & (frame["attack"] == "apgd") & (frame["epsilon"] == 0.1)]
    assert right["broken_at"].notna().mean() == pytest.approx(result.success_rate(0.1, attack="apgd"), abs=0.12)
    result.save(tmp_path)
    loaded = load_result(tmp_path)
    assert loaded == result
    assert (list(loaded.records), loaded.candidates) == ([], None)
