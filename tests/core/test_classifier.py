"""Classifiers: rows on their own, eval mode, counted passes; criteria by sorting, Foolbox, and sets by enumeration."""

import itertools
import random

import eagerpy as ep
import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import binarization_test, evaluate_defense, mead, robust_accuracy
from robust_ext.core.classifier import check_classifier, check_consistency
from robust_ext.core.criteria import AIMED, MISCLASSIFICATION, MultiLabel, Targeted, TopK, check_criterion
from robust_ext.core.errors import InvalidArgumentError, ModelError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter, count_all_calls
from robust_ext.core.threat import ThreatModel
from robust_ext.evaluations.binarization.planting import plant
from robust_ext.models.label_sets import LabelSets, classify_label_sets
from tests.attacks.problems import Lambda
from tests.models.cases import Net

LINF = ThreatModel(norm="linf", epsilon=0.1)
X = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(12, dtype=torch.int64)


def made(before=lambda x: x, after=lambda x: x):
    with seeded_globals(1):
        body = nn.Sequential(nn.Flatten(), nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 4))
    return Net(lambda net, x: after(net.body(before(x))), body=body)


def quantised(x):
    scale = x.abs().amax() / 7
    return (x / scale).round() * scale


RANDOM = {
    "torch": lambda x: x + 0.01 * torch.randn_like(x),
    "numpy": lambda x: x + 0.01 * torch.from_numpy(np.random.rand(*x.shape)).float(),
    "python": lambda x: x + 0.1 if random.random() < 0.5 else x,
    "dropout": lambda x: nn.functional.dropout(x, 0.2),
}
BATCH = {
    "mean": lambda x: x - 0.05 * x.mean(0, keepdim=True),
    "statistics": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    # The same in every call, and another for every place in the batch.
    "place": lambda x: x + 0.05 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
    "size": lambda x: x * (1 + 0.01 * len(x)),
    "quantised": quantised,
    "order": lambda x: x - 0.1 * x.roll(1, 0),
}
IN_PLACE = {"clamp": lambda x: x.clamp_(0.1, 0.9), "normalise": lambda x: x.sub_(0.5).div_(0.25)}
KINDS = {"is random": RANDOM, "is batch-dependent": BATCH, "changes its input in place": IN_PLACE}


@pytest.mark.parametrize("rows", [1, 2, 12])
@pytest.mark.parametrize("words", KINDS)
def test_each_kind_is_named(words, rows):
    states, given = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()), X.clone()
    for before in KINDS[words].values():
        with pytest.raises(ModelError, match=f"^model: {words}"):
            check_consistency(made(before), given[:rows], bounds=(0.0, 1.0))
    assert torch.equal(given, X)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


@pytest.mark.parametrize("width", [16, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_is_no_inconsistency(width, dtype):
    """Kernels for other batch sizes round differently: deep and wide networks pass all the same."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, width), *(nn.Linear(width, width) for _ in range(6)), nn.Linear(width, 10)]
    for layer in layers:
        layer.weight.data.mul_(2.4)
    network = nn.Sequential(
        nn.Flatten(), Lambda(lambda x: x.to(dtype)), *(part for one in layers for part in (nn.ReLU(), one))
    )
    check_consistency(network.to(dtype).eval(), torch.rand(4, 1, 16, 16), bounds=(0.0, 1.0))


def test_models_with_non_finite_logits_somewhere_pass():
    """Of single values, and of the images without contrast that stand beside a row while it is looked at."""
    standardised = made(lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True))
    assert bool(standardised(torch.zeros(2, 1, 4, 4)).isnan().all())
    for network in (made(after=lambda x: torch.where(x > 0.2, torch.inf, x)), standardised):
        check_consistency(network, X, bounds=(0.0, 1.0))


PGD = "robust_ext:APGD(steps=2)"
EVALUATIONS = {
    "binarization": lambda model: binarization_test(model, PGD, X, LINF, inner_points=20),
    "pair": lambda model: binarization_test(
        (nn.Sequential(model, nn.ReLU()).eval(), nn.Linear(4, 3).eval()), PGD, X, LINF, inner_points=20
    ),
    "plant": lambda model: plant(model, X, LINF, inner_points=20),
    "robust accuracy": lambda model: robust_accuracy(model, PGD, X, Y, LINF),
    "mead": lambda model: mead(model, PGD, X, Y, LINF, detectors=lambda x: x.flatten(1).std(1)),
    "static": lambda model: evaluate_defense(torch.round, PGD, X, Y, LINF, classifier=model),
    "defense": lambda model: evaluate_defense(model, PGD, X, Y, LINF, classifier=made()),
}


@pytest.mark.parametrize("evaluate", EVALUATIONS.values(), ids=EVALUATIONS)
def test_every_evaluation_refuses_them_and_leaves_the_inputs_alone(evaluate):
    before, argument = X.clone(), "defense" if evaluate is EVALUATIONS["defense"] else "model"
    # A defense is given a copy.
    kinds = {"is random": RANDOM["torch"], "is batch-dependent": BATCH["statistics"]}
    for words, kind in (kinds if argument == "defense" else kinds | {"changes its": IN_PLACE["clamp"]}).items():
        with pytest.raises(ModelError, match=f"^{argument}: {words}"):
            evaluate(made(kind))
    if argument == "defense":
        evaluate(made(IN_PLACE["clamp"]))
    assert torch.equal(X, before)


def counts(counter):
    return counter.forward, counter.backward


def test_rows_are_counted_forward_and_backward():
    layers = nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)
    network, counter = nn.Sequential(*layers).eval(), PassCounter()
    counted, x = Counted(network, counter), torch.rand(5, 4)
    # It is in the mode of the module.
    assert not counted.training
    assert Counted(nn.Flatten().train(), counter).training
    assert torch.equal(counted(x), network(x))
    assert counts(counter) == (5, 0)
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(counted(leaf).sum(), leaf)
    assert counts(counter) == (10, 5)
    torch.testing.assert_close(gradient, torch.autograd.grad(network(leaf).sum(), leaf)[0])
    # Two passes back through one pass forward.
    out = counted(leaf)
    out[:, 0].sum().backward(retain_graph=True)
    out[:, 1].sum().backward()
    assert counts(counter) == (15, 15)
    # A pass forward whose gradient is never taken.
    counted(leaf)
    assert counts(counter) == (20, 15)
    before = counter.snapshot()
    # Calls within one graph count each.
    leaf = torch.rand(2, 4, requires_grad=True)
    sum(counted(leaf + i).sum() for i in range(4)).backward()
    assert counts(counter.since(before)) == (8, 8)


@pytest.mark.parametrize("module", [nn.Identity(), nn.Dropout(0.5).eval(), nn.Flatten()])
def test_a_module_that_returns_its_input_leaves_no_hook_on_it(module):
    """Some modules return the very tensor they got; that one belongs to the attack, which goes on using it."""
    counter = PassCounter()
    counted = Counted(module, counter)
    leaf = torch.rand(3, 2, requires_grad=True)
    for step in range(1, 5):
        (gradient,) = torch.autograd.grad(counted(leaf).sum(), leaf)
        assert torch.equal(gradient, torch.ones(3, 2))
        assert counts(counter) == (3 * step, 3 * step)
    torch.autograd.grad((leaf * 2).sum(), leaf)
    assert counts(counter) == (12, 12)


def test_parts_in_train_mode_are_named():
    assert check_classifier(nn.Sequential(nn.Flatten()).eval(), torch.rand(2, 4)).shape == (2, 4)
    normed = nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True)
    for part in (*normed, nn.Dropout(0.1), nn.AlphaDropout()):
        model = nn.Sequential(nn.Identity(), part, nn.Flatten()).eval()
        part.train()
        with pytest.raises(ModelError, match=r"^model: 1 is in train mode.*call model.eval\(\) first"):
            check_classifier(model, torch.rand(2, 4))


def test_parts_of_several_networks_are_counted_as_their_share():
    halves, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 2)
    counter, x = PassCounter(), torch.rand(3, 4, requires_grad=True)
    with count_all_calls({"halves": halves, "other": other}, counter):
        for part in (*halves, *halves):
            part(x).sum().backward()
        other(halves(x.detach()))
    assert (counter.forward, counter.backward) == (4 * 3 // 2 + 3 + 3, 4 * 3 // 2)
    other(x)
    assert counter.forward == 12


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
