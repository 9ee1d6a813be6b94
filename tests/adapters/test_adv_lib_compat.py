"""adv-lib's attacks with settings that change how they treat samples, measured, and what the adapter fixes."""

from importlib import import_module

import pytest
import torch
from torch import nn

from robust_ext import AttackRefusedError, ThreatModel, as_attack
from tests.adapters import common
from tests.adapters.common import Recorder, conv_network, predicted, require, uniform

require("adv_lib")
attack_module = import_module("robust_ext.adapters.adv_lib.attack")
CATALOGUE = attack_module.CATALOGUE
ENTRIES = CATALOGUE.entries

NAMES = sorted(ENTRIES)
ROWS = 5


def network(classes=5):
    return conv_network((3, 8, 8), classes)


X = uniform(ROWS, (3, 8, 8))
Y = predicted(network(), X)


def run(attack, module, x, y, threat_model, seed=3):
    with torch.no_grad():
        classes = module(x).shape[1]
    return common.run(attack, module, x, y, threat_model, classes=classes, seed=seed, direct=False)


def attack_of(name, **settings):
    return as_attack((CATALOGUE.find(name), {**ENTRIES[name].trial, **settings}))


def threat_model_of(attack, epsilon=None):
    # Left out: so far that attacks which are given it succeed on some of the rows.
    norm = attack.traits.norms[0]
    return ThreatModel(norm=norm, epsilon=epsilon or {"linf": 0.02, "l2": 0.1, "l1": 0.6}[norm])


def record(attack, threat_model):
    recorder = Recorder(network())
    run(attack, recorder, X, Y, threat_model)
    return recorder.queries[1:]


class Flat(nn.Module):
    """No gradient, and always class 0."""

    def forward(self, x):
        return torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_gradients_whose_values_share_memory_are_copied():
    y = torch.zeros(ROWS, dtype=torch.int64)
    attack = attack_of("pgd_linf")
    assert torch.equal(run(attack, Flat(), X, y, threat_model_of(attack)), X)


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_misclassified_already_stay_so(name):
    wrong = torch.where(torch.arange(ROWS) < 3, (Y + 1) % 5, Y)
    attack = attack_of(name)
    candidates = run(attack, network(), X, wrong, threat_model_of(attack))
    assert bool((network()(candidates).argmax(1) != wrong)[:3].all())


@pytest.mark.parametrize("name", NAMES)
def test_single_rows_and_features_are_accepted_or_refused_with_a_reason(name):
    attack = attack_of(name)
    threat_model = threat_model_of(attack)
    assert run(attack, network(), X[:1], Y[:1], threat_model).shape == X[:1].shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    flat = torch.rand(ROWS, 12, generator=torch.Generator().manual_seed(1))
    labels = module(flat).argmax(1)
    if ENTRIES[name].dimensions:
        with pytest.raises(AttackRefusedError, match=r"\(12,\); choose"):
            run(attack, module, flat, labels, threat_model)
    else:
        assert run(attack, module, flat, labels, threat_model).shape == flat.shape


def test_fmn_for_l0_ends_where_one_value_suffices():
    attack = attack_of("fmn", norm=0)
    threat_model = ThreatModel(norm="l1", epsilon=1.0)
    candidates = run(attack, network(), X[:1], Y[:1], threat_model)
    assert int((candidates != X[:1]).sum()) == 1
    assert bool(network()(candidates).argmax(1) != Y[:1])


def test_str_attack_ends_where_it_found_nothing():
    x = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    attack = attack_of("str_attack", binary_search_steps=1, max_iterations=1, retrain=True)
    labels = torch.zeros(1, dtype=torch.int64)
    threat_model = ThreatModel(norm="l2", epsilon=1.0)
    assert torch.equal(run(attack, Flat(), x, labels, threat_model), x)


# Settings other than the trial's that change what is queried, and the rows that follow.
VARIANTS = [
    ("apgd_targeted", {}, "any"),
    ("apgd", {"n_restarts": 3}, "any"),
    ("apgd", {"use_large_reps": True, "n_restarts": 3, "norm": 1}, "single"),
    ("apgd_targeted", {"n_restarts": 2}, "any"),
    ("apgd_targeted", {"use_large_reps": True, "norm": 1}, "single"),
    ("minimal_apgd", {"n_restarts": 2}, "single"),
    ("minimal_apgd", {"targeted_version": True}, "single"),
    ("pgd_linf", {"restarts": 3}, "any"),
    ("df", {"norm": float("inf")}, "single"),
    ("fab", {"restarts": 3, "norm": 2}, "full"),
    ("fab", {"targeted_restarts": True, "norm": 1}, "full"),
    ("fmn", {"norm": 0}, "full"),
    ("pdpgd", {"norm": 1}, "full"),
    ("tr", {"adaptive": True}, "single"),
]


@pytest.mark.parametrize(("name", "settings", "rows"), VARIANTS)
def test_rows_and_the_ball_are_as_measured(name, settings, rows):
    attack = attack_of(name, **settings)
    assert attack.traits.batching == rows
    batches = record(attack, threat_model_of(attack))
    assert batches
    whole = all(len(points) == ROWS for points in batches)
    # The l0 attacks go through the whole box at once, where the nearest input means nothing.
    if whole and name != "sigma_zero":
        nearest = [torch.cdist(points.flatten(1), X.flatten(1)).argmin(1).tolist() for points in batches]
        whole = all(order == list(range(ROWS)) for order in nearest)
    assert whole == (rows == "full")
    # An attack that is given epsilon stays in a ball of any size; one that is not leaves a small one.
    threat_model = threat_model_of(attack, epsilon=1e-3)
    order = {"linf": torch.inf, "l2": 2.0, "l1": 1.0}[threat_model.norm]
    points = torch.cat(record(attack, threat_model)).double().flatten(1)
    farthest = torch.cdist(points, X.double().flatten(1), p=order).amin(1).max()
    assert bool(farthest > threat_model.epsilon + threat_model.tolerance(X[0].numel())) == attack.traits.leaves_ball
    assert not (attack.traits.leaves_ball and attack.traits.batching == "any")


def uses_global_randomness(name, settings, module):
    """Whether two seeds lead through different queries."""
    attack = attack_of(name, **settings)
    seen = []
    for seed in (1, 2):
        recorder = Recorder(module)
        run(attack, recorder, X, predicted(module, X), threat_model_of(attack), seed=seed)
        seen.append(torch.cat(recorder.queries))
    return seen[0].shape != seen[1].shape or not torch.allclose(*seen, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in NAMES),
        ("alma", {"init_lr_distance": 0.5}),
        ("fab", {"restarts": 2}),
        ("pdgd", {"random_init": 0.1}),
        ("pdpgd", {"random_init": 0.1}),
        ("pdgd", {"random_init": 0}),
    ],
)
def test_seeds_are_as_measured(name, settings):
    # Without gradients, DDN and ALMA go in random directions.
    drawn = any(uses_global_randomness(name, settings, module) for module in (network(), Flat()))
    assert (attack_of(name, **settings).traits.seeds == "global") == drawn
