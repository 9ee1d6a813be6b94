"""What candidates are found to be, whatever the attack says of them and whatever class of tensors they are."""

import itertools
import re
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.core.errors import AttackError
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import LOST, OUTCOMES, UNDONE, take_witnesses, verify

NAN, INF = float("nan"), float("inf")
LINF = ThreatModel(norm="linf", epsilon=0.25)


class FirstValue(nn.Module):
    """Class 1 where the first value of a sample is above .5; remembers the batches it saw.

    One logit is ``broken`` where the second value is above .5.
    """

    def __init__(self, broken=None):
        super().__init__()
        self.seen, self.broken = [], broken

    def forward(self, x):
        assert not torch.is_grad_enabled()
        self.seen.append(x)
        first = x.flatten(1)[:, 0] - 0.5
        if self.broken is not None:
            return torch.stack([-first, torch.where(x.flatten(1)[:, 1] > 0.5, self.broken, first)], 1)
        return torch.stack([-first, first], 1)


def check(candidates, inputs, threat_model=LINF, labels=None, **more):
    labels = torch.zeros(len(inputs), dtype=torch.int64) if labels is None else labels
    keywords = {"module": FirstValue(), "threat_model": threat_model, "attack": "my attack", **more}
    return verify(candidates, inputs, labels, **keywords), keywords["module"]


def test_every_outcome_and_what_a_detector_rejects():
    inputs = torch.full((7, 1, 2, 2), 0.4)
    candidates = inputs + 0.2
    candidates[1], candidates[2] = inputs[1], 0.9
    candidates[3:, 0, 1, 1] = torch.tensor([1.1, NAN, INF, -INF])
    kept = candidates.clone()
    result, module = check(candidates, inputs)
    expected = ("found", "not_adversarial", "beyond_epsilon", "out_of_bounds", *["not_finite"] * 3)
    assert result.outcomes == expected
    assert {*expected, "rejected", "non_finite_logits", UNDONE, *LOST} == set(OUTCOMES)
    np.testing.assert_allclose(result.distances, [0.2, 0, 0.5, 0.7, NAN, NAN, NAN], atol=1e-7)
    # What is judged: the clean input in place of what is no valid input.
    assert torch.equal(result.candidates[:3], candidates[:3])
    assert torch.equal(result.candidates[3:], inputs[3:])
    assert [len(batch) for batch in module.seen] == [7]
    assert torch.equal(module.seen[0], result.candidates)
    with torch.no_grad():
        assert torch.equal(result.logits, FirstValue()(result.candidates))
    assert torch.equal(candidates.nan_to_num(7), kept.nan_to_num(7))
    rejects = Mock(return_value=torch.tensor([True, True, False]))
    result, _ = check(candidates[[0, 1, 0]], inputs[:3], rejects=rejects)
    assert result.outcomes == ("rejected", "not_adversarial", "found")
    assert torch.equal(rejects.call_args.args[0], result.candidates)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (-3.0, 2.5)])
def test_the_edges_of_the_ball_and_of_the_bounds(norm, bounds):
    threat_model = ThreatModel(norm=norm, epsilon=0.25, bounds=bounds)
    inputs = torch.full((2, 4), 0.375, dtype=torch.float32)
    growth = {"linf": 1, "l2": 2, "l1": 4}[norm]
    limit = 0.25 * (1 + 1e-5) + 2e-7 * max(map(abs, bounds)) * growth
    each = torch.tensor([[limit - 1e-12], [limit + 1e-12]], dtype=torch.float64) / growth
    result, _ = check(inputs.double() + each, inputs, threat_model, torch.tensor([2, 2]))
    assert result.outcomes == ("found", "beyond_epsilon")
    np.testing.assert_allclose(result.distances, [limit - 1e-12, limit + 1e-12], rtol=0, atol=1e-14)
    slack = 1e-6 * max(map(abs, bounds))
    edges = [end + side * share * slack for side, end in ((-1, bounds[0]), (1, bounds[1])) for share in (0.9, 1, 1.1)]
    candidates, ends = torch.tensor(edges, dtype=torch.float64)[:, None], [*[bounds[0]] * 3, *[bounds[1]] * 3]
    result, _ = check(candidates, torch.tensor(ends)[:, None], threat_model, torch.full((6,), 2))
    assert result.outcomes == ("found", "found", "out_of_bounds") * 2
    assert result.candidates.flatten().tolist() == ends


def test_values_at_the_edges_come_out_as_by_hand():
    """One entry around an end of bounds or ball, against the definition in Python's floats."""
    low, high = np.array([-1.0, 0, 2]), np.array([1.0, 4, 10])
    threat_model = ThreatModel(norm="linf", epsilon=0.5, bounds=(low, high))
    slack, rows, expected = 1e-6 * np.maximum(np.abs(low), np.abs(high)), [], []
    edges = (-3, -1.5, -0.5, 0.0, 0.5, 1.5, 3, 1e5)
    for place, entry, end, edge in itertools.product(range(5), range(3), range(5), edges):
        x = low + (high - low) / 4 * place
        row = x.astype(np.float32)
        row[entry] = (low, high, x - 0.5, x + 0.5, x)[end][entry] + edge * slack[entry]
        rows.append((x, row))
        if ((row.astype(float) < low - slack) | (row.astype(float) > high + slack)).any():
            expected.append("out_of_bounds")
        elif np.abs(row.astype(float) - x).max() > 0.5 + threat_model.tolerance(3):
            expected.append("beyond_epsilon")
        else:
            expected.append("found" if row.astype(float).clip(low, high)[0] > 0.5 else "not_adversarial")
    inputs, candidates = (torch.tensor(np.float32(part)) for part in zip(*rows, strict=True))
    assert check(candidates, inputs, threat_model)[0].outcomes == tuple(expected)
    assert {*expected} == {"out_of_bounds", "beyond_epsilon", "found", "not_adversarial"}


def test_a_point_of_the_grid_without_finite_logits_breaks_the_model_whatever_was_there_before_rounding():
    class NanOnTheGrid(FirstValue):
        def forward(self, x):
            return super().forward(x).masked_fill(x[:, :1] == 0.5, NAN)

    threat_model = ThreatModel(norm="linf", epsilon=0.5, levels=3)
    candidates = torch.tensor([[0.7, 0.0], [0.8, 0.0]])
    result, _ = check(candidates, torch.full((2, 2), 0.5), threat_model, module=NanOnTheGrid())
    assert result.outcomes == ("non_finite_logits", "found")


def test_candidates_are_judged_as_the_float32_they_become_in_any_layout():
    """Adversarial in float64 only is not adversarial."""
    candidates = torch.tensor([[0.5 + 1e-12], [0.5 + 1e-6]], dtype=torch.float64)
    result, module = check(candidates, torch.tensor([[0.5], [0.5]]))
    assert result.outcomes == ("not_adversarial", "found")
    assert module.seen[0].dtype == result.candidates.dtype == torch.float32
    np.testing.assert_allclose(result.distances, [1e-12, 1e-6], rtol=1e-3)
    result, module = check(torch.tensor([[0.625]], dtype=torch.bfloat16), torch.tensor([[0.5]]))
    assert (result.outcomes, module.seen[0].dtype) == (("found",), torch.float32)
    inputs = torch.full((3, 2, 4), 0.4).transpose(1, 2)
    result, _ = check((inputs + 0.2).requires_grad_(), inputs)
    assert result.outcomes == ("found",) * 3
    assert not result.candidates.requires_grad
    assert not result.logits.requires_grad


class Dispatching(torch.Tensor):
    __torch_dispatch__ = classmethod(lambda *_: 1 / 0)


ZEROS = torch.zeros(2, 3)
NO_CANDIDATES = [
    *((one, f"{type(one).__name__}, expected a tensor") for one in (None, np.zeros((2, 3)), (ZEROS,))),
    *((torch.zeros(shape), f"shape {shape}") for shape in ((3, 3), (2, 3, 1), (3,))),
    *((ZEROS.to(kind), f"dtype {kind}, expected floating") for kind in (torch.int64, torch.complex64)),
    (ZEROS.to_sparse(), "a tensor of layout torch.sparse_coo"),
    (ZEROS.to("meta"), "a tensor on the meta"),
    (ZEROS.as_subclass(Dispatching), "a tensor of Dispatching, a class that defines __torch_dispatch__"),
]


def test_what_is_no_batch_of_candidates():
    for candidates, message in NO_CANDIDATES:
        with pytest.raises(AttackError, match=f"^my attack: returned {re.escape(message)}"):
            check(candidates, ZEROS)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("label", [0, 1])
def test_logits_that_are_not_finite_are_an_outcome_of_their_own(broken, label):
    """Whatever the label is; an infinite logit that masks a class is no exception."""
    candidates = torch.tensor([[0.4, 0.6], [0.6, 0.6], [0.4, 0.9], [0.6, 0.4]])
    rejects = Mock(return_value=torch.tensor([True, False, False, False]))
    given = {"labels": torch.full((4,), label), "module": FirstValue(broken), "rejects": rejects}
    result, _ = check(candidates, torch.full((4, 2), 0.4), **given)
    last = "found" if label == 0 else "not_adversarial"
    assert result.outcomes == ("non_finite_logits", "non_finite_logits", "beyond_epsilon", last)


def test_witnesses_stand_in_where_nothing_was_found_and_only_where_they_are_confirmed():
    inputs, labels, module = torch.full((6, 2), 0.4), torch.zeros(6, dtype=torch.int64), FirstValue(NAN)
    candidates = torch.tensor([[0.6, 0.4], [0.4, 0.4], [0.4, 0.4], [0.4, 0.4], [NAN, 0.4], [0.9, 0.4]])
    # Found already; confirmed; finite there; beyond epsilon; confirmed twice, for candidates that break the rules.
    witnesses = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.4, 0.45], [0.4, 0.9], [0.5, 0.6], [0.3, 0.6]])
    found, _ = check(candidates, inputs, module=module)
    expected = ("found", "not_adversarial", "not_adversarial", "not_adversarial", "not_finite", "beyond_epsilon")
    assert found.outcomes == expected
    options = {"module": module, "threat_model": LINF, "attack": "my attack"}
    result = take_witnesses(found, witnesses, inputs, labels, **options)
    broken = "non_finite_logits"
    assert result.outcomes == ("found", broken, "not_adversarial", "not_adversarial", broken, broken)
    taken = torch.tensor([False, True, False, False, True, True])
    assert torch.equal(result.candidates[taken], witnesses[taken])
    assert torch.equal(result.candidates[~taken], found.candidates[~taken])
    np.testing.assert_allclose(result.distances[taken], [0.2, 0.2, 0.2], atol=1e-6)
    assert result.logits.isnan().any(1).tolist() == taken.tolist()
    none = torch.full_like(witnesses, NAN)
    assert take_witnesses(found, none, inputs, labels, **options) is found
