"""The cascade against a recount from the candidates, and against robustness that is known exactly."""

import numpy as np
import pytest
import torch
from torch import nn

import robust_ext
from robust_ext import ThreatModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network
from robust_ext.engine.run import candidates_name
from tests.run_folders import runs_of

LENGTHS = {"linf": lambda step: np.abs(step).max(1), "l2": lambda step: np.sqrt((step**2).sum(1))}
DUAL = {"linf": lambda w: w.abs().sum(-1), "l2": lambda w: w.norm(dim=-1)}
ALONE = {"budget": "quick", "planted": 0}


def candidates_of(saved):
    """The candidate of each sample that was attacked."""
    found, indices = {}, [record["index"] for record in saved.records()]
    for start in indices:
        arrays = saved.load(candidates_name(start))
        if arrays is not None:
            later = [index for index in indices if index >= start][: len(arrays["candidates"])]
            found |= dict(zip(later, arrays["candidates"], strict=True))
    assert list(found) == indices
    return found


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 0.12), ("l2", 0.9)])
def test_each_attack_gets_the_samples_that_stand_and_no_others(norm, epsilon, tmp_path):
    """Everything is counted again from the candidates in the run folder, by numpy and a forward pass."""
    network, (x, y) = digits_network(), load_dataset("digits").take(range(24))
    y[5] = (y[5] + 1) % 10
    result = robust_ext.evaluate(
        network, x, y, ThreatModel(norm=norm, epsilon=epsilon), out=tmp_path, batch_size=7, **ALONE
    )
    runs, rows = runs_of(tmp_path / "attacks"), result.content["steps"]
    stands = {index for index in range(24) if network(x[index : index + 1]).argmax() == y[index]}
    assert 5 not in stands
    finders, left = {}, []
    for row in rows:
        (saved,) = (one for place, one in runs.items() if place.startswith(f"{row['name']}-{norm}"))
        found = candidates_of(saved)
        assert found.keys() == stands, row["name"]
        points = np.stack([found[index] for index in sorted(found)])
        order = sorted(found)
        assert points.min() >= 0
        assert points.max() <= 1
        inside = LENGTHS[norm]((points - x[order].numpy()).reshape(len(order), -1).astype(float)) <= epsilon + 1e-6
        wrong = network(torch.from_numpy(points)).argmax(1) != y[order]
        broken = {index for index, one, other in zip(order, inside, wrong.tolist(), strict=True) if one and other}
        assert row["broken"] == len(broken)
        finders |= dict.fromkeys(broken, row["name"])
        stands = stands - broken
        left.append(len(stands) / 24)
    assert [row["robust_accuracy"] for row in rows] == left
    assert len(rows) >= 3
    assert finders
    worst = result.content["worst_case"]
    assert {index for index, one in enumerate(worst["robust"]) if one == "1"} == stands
    assert result.robust_accuracy == len(stands) / 24
    assert result.content["found_by"] == [finders.get(index) for index in range(24)]
    assert sum(row["broken"] for row in rows) == worst["broken"] == len(finders)


@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize("norm", LENGTHS)
def test_a_linear_network_is_as_robust_as_the_closed_form_says(norm, classes):
    """Its distance to each other class is the margin over the dual norm of the difference of weights."""
    draw = torch.Generator().manual_seed(classes)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, classes)).eval().requires_grad_(False)
    nn.utils.vector_to_parameters(torch.randn(37 * classes, generator=draw), network.parameters())
    x = torch.rand(120, 1, 6, 6, generator=draw)
    logits, weights = network(x), network[1].weight
    y = logits.argmax(1)
    gaps = logits.gather(1, y[:, None]) - logits
    distances = (gaps / DUAL[norm](weights[y][:, None] - weights).clamp_min(1e-30)).masked_fill(gaps == 0, np.inf)
    distances = distances.amin(1)
    epsilon = distances.median().item()
    kept = (distances / epsilon - 1).abs() > 0.02  # Nearer to the sphere rounding decides.
    bounds = (-20.0, 20.0)  # No bound is in the way.
    result = robust_ext.evaluate(
        network, x[kept], y[kept], ThreatModel(norm=norm, epsilon=epsilon, bounds=bounds), **ALONE
    )
    robust = [one == "1" for one in result.content["worst_case"]["robust"]]
    assert robust == (distances[kept] > epsilon).tolist()
    assert 0.4 < result.robust_accuracy < 0.6
    curve = {row["epsilon"]: row["robust_accuracy"] for row in result.content["curve"]}
    assert list(curve) == sorted(curve)
    assert (curve[0.0], curve[epsilon]) == (1, result.robust_accuracy)
    below = [(size, value) for size, value in curve.items() if size < epsilon]
    assert all(value >= (distances[kept] > size * 1.03).double().mean() for size, value in below)
    for budget in distances[kept & (distances > epsilon)].quantile(torch.tensor([0.25, 0.5, 0.75])).tolist():
        reached = min(value for size, value in curve.items() if size <= budget * 1.02)
        assert reached >= (distances[kept] > budget * 1.03).double().mean().item()
        assert reached <= (distances[kept] > budget * 0.98).double().mean().item()


def test_nothing_runs_where_nothing_stands():
    network, (x, y) = digits_network(), load_dataset("digits").take(range(16))
    result = robust_ext.evaluate(network, x, y, ThreatModel(norm="linf", epsilon=0.5), **ALONE)
    assert result.robust_accuracy == 0
    steps, left_out = result.content["steps"], result.content["not_tried"]
    assert steps[-1]["robust_accuracy"] == 0
    assert left_out
    assert {one["reason"] for one in left_out} == {"no sample was left standing"}
    assert not {one["name"] for one in left_out} & {one["name"] for one in steps}
