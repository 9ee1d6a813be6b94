"""Criteria against sorting by numpy, Foolbox's criteria, and sets of labels by enumeration."""

import itertools

import eagerpy as ep
import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import InvalidArgumentError, MultiLabel, Targeted, TopK
from robust_ext.core.criteria import AIMED, MISCLASSIFICATION, check_criterion
from robust_ext.models.label_sets import LabelSets, classify_label_sets

DRAW = torch.Generator().manual_seed(0)
LOGITS = torch.randn(200, 6, generator=DRAW)
GOALS = torch.randint(6, (200,), generator=DRAW)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_top_k_by_sorting(k):
    order = np.argsort(-LOGITS.numpy(), axis=1)
    outside = [goal not in row[:k] for goal, row in zip(GOALS.tolist(), order.tolist(), strict=True)]
    assert TopK(k).adversarial(LOGITS, GOALS).tolist() == outside
    assert TopK(k).correct(LOGITS, GOALS).tolist() == [not one for one in outside]
    others = [
        sorted((z for i, z in enumerate(row) if i != y), reverse=True)[k - 1] - row[y]
        for row, y in zip(LOGITS.tolist(), GOALS.tolist(), strict=True)
    ]
    np.testing.assert_allclose(TopK(k).margin(LOGITS, GOALS).numpy(), others, rtol=1e-6)


def test_a_margin_above_0_is_success_as_by_foolbox():
    for criterion in (MISCLASSIFICATION, AIMED, TopK(1), TopK(2), TopK(5)):
        assert torch.equal(criterion.margin(LOGITS, GOALS) > 0, criterion.adversarial(LOGITS, GOALS))
    assert torch.equal(TopK(1).margin(LOGITS, GOALS), MISCLASSIFICATION.margin(LOGITS, GOALS))
    # A tie leaves the true class among the top.
    assert not TopK(2).adversarial(torch.ones(1, 3), torch.tensor([2])).item()
    criteria, logits = pytest.importorskip("foolbox").criteria, ep.astensor(LOGITS)
    theirs = {MISCLASSIFICATION: criteria.Misclassification, AIMED: criteria.TargetedMisclassification}
    for criterion, kind in theirs.items():
        assert torch.equal(criterion.adversarial(LOGITS, GOALS), kind(GOALS)(logits, logits).raw)


def targets(rule, labels, logits, **more):
    return Targeted(rule, **more).goals(labels, logits=logits, ids=range(len(labels)))


def test_rules_of_targets():
    assert targets("next", torch.tensor([0, 5]), LOGITS[:2]).tolist() == [1, 0]
    likeliest = LOGITS.numpy().copy()
    likeliest[np.arange(200), GOALS.numpy()] = -np.inf
    assert targets("likeliest", GOALS, LOGITS).tolist() == likeliest.argmax(1).tolist()
    drawn = torch.stack([targets("random", GOALS, LOGITS, seed=seed) for seed in range(40)])
    assert not bool((drawn == GOALS).any())
    # Uniform over five classes: 8,000 draws of probability .2, within four deviations.
    counts = np.bincount(((drawn - GOALS) % 6).flatten().numpy(), minlength=6)[1:]
    assert np.abs(counts - 1600).max() < 4 * np.sqrt(8000 * 0.2 * 0.8)
    # By the id of the sample, not by its place.
    again = Targeted("random", seed=3).goals(GOALS[[7]], logits=LOGITS[[7]], ids=[7])
    assert again.item() == drawn[3, 7].item()


REFUSED = {
    r"TopK\(k=6\).*below the number of classes": lambda: TopK(6).goals(GOALS, logits=LOGITS, ids=range(200)),
    "targets: got .*best": lambda: Targeted("best"),
    "targets: got labels in 6..6": lambda: targets(6, GOALS, LOGITS),
    "targets: got the true class for": lambda: targets(2, GOALS, LOGITS),
    "columns of the labels": lambda: MultiLabel((1, 1)),
    "criterion: got 'top-5'": lambda: check_criterion("top-5"),
}


def test_refusals():
    for words, make in REFUSED.items():
        with pytest.raises(InvalidArgumentError, match=words):
            make()


@pytest.mark.parametrize("chosen", [None, (0, 2), (3,)])
def test_sets_of_labels_are_wrong_where_one_label_is(chosen):
    logits = torch.cat([LOGITS[:, :4] * scale for scale in (1e-4, 1, 1e4)])
    labels = torch.randint(2, logits.shape, generator=torch.Generator().manual_seed(1))
    # Half of the rows are right.
    labels[::2] = (logits[::2] > 0).long()
    module, own = classify_label_sets(nn.Identity(), labels, logits, MultiLabel(chosen))
    columns = list(range(4) if chosen is None else chosen)
    flipped = ((logits > 0).long() != labels)[:, columns].any(1)
    found = module(logits)
    assert torch.equal(found.argmax(1) != own, flipped)
    margin = MISCLASSIFICATION.margin(found, own)
    assert torch.equal(margin > 0, flipped)
    right = ~flipped
    assert torch.equal(margin[right], -logits[right][:, columns].abs().amin(1))


def test_cross_entropy_of_all_sets_is_that_of_all_labels():
    sets = torch.tensor(list(itertools.product((0, 1), repeat=3)))
    logits, row = LOGITS[:, :3].double(), torch.randint(8, (200,), generator=torch.Generator().manual_seed(2))
    joint = nn.functional.cross_entropy(LabelSets(nn.Identity(), sets)(logits), row, reduction="none")
    single = nn.functional.binary_cross_entropy_with_logits(logits, sets[row].double(), reduction="none").sum(1)
    torch.testing.assert_close(joint, single)
