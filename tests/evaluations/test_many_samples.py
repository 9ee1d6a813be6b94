"""What a run takes beside passes grows as its samples do: in calls of functions, which no other work disturbs."""

import cProfile
import pstats
from unittest.mock import Mock

import pytest
import torch

import robust_ext
from tests.evaluations.small import LINF, NETWORK

FEW = {"inner_points": 8, "random_inner": 2, "random_corners": 2, "depths": (1,), "canaries": 0, "batch_size": 64}


def accuracy(inputs, **given):
    return robust_ext.robust_accuracy(NETWORK, lambda model, x, y: x, inputs, NETWORK(inputs).argmax(1), LINF, **given)


def planted(inputs, **given):
    return robust_ext.binarization_test(NETWORK, lambda model, x, y: x, inputs, LINF, sequential=False, **FEW, **given)


@pytest.mark.parametrize("evaluation", [accuracy, pytest.param(planted, marks=pytest.mark.exhaustive)])
def test_calls_grow_with_the_samples(evaluation, tmp_path):
    listener, calls = Mock(spec=["on_record", "on_result"]), []
    for blocks in (2, 4, 8, 16):
        inputs = torch.rand(64 * blocks, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        with cProfile.Profile() as profile:
            evaluation(inputs, out=tmp_path / f"{blocks}", callbacks=[listener])
        calls.append(pstats.Stats(profile).total_calls)
    # Twice as many more take twice as many more calls, beside what is made once; what is quadratic takes four times.
    assert calls[3] - calls[2] < 2.6 * (calls[2] - calls[1])
    assert listener.on_record.call_count == 64 * (2 + 4 + 8 + 16)
