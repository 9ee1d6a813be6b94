"""adv-lib's attacks with settings that change how they treat samples, measured, and what the adapter fixes."""

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from robust_ext import AttackRefusedError, ThreatModel, as_attack
from robust_ext.core.random import seeded_globals
from tests.adapters import common
from tests.adapters.common import Recorder, catalogue, conv_network, drawn_seed, predicted, require, uniform

adv_lib = require("adv_lib")
ENTRIES, ROWS, INF = catalogue("adv_lib").entries, 5, float("inf")
NETWORK = conv_network((3, 8, 8))
X = uniform(ROWS, (3, 8, 8))
Y = predicted(NETWORK, X)


def run(attack, module=NETWORK, x=X, epsilon=None, *, seed=3, direct=False):
    """Candidates; where no epsilon is given, one so large that attacks which are given it succeed on some rows."""
    norm, labels = attack.traits.norms[0], predicted(module, x)
    threat_model = ThreatModel(norm=norm, epsilon=epsilon or {"linf": 0.02, "l2": 0.1, "l1": 0.6}[norm])
    return common.run(attack, module, x, labels, threat_model, classes=5, seed=seed, direct=direct)


def attack_of(name, **settings):
    return as_attack((catalogue("adv_lib").find(name), {**ENTRIES[name].trial, **settings}))


class Flat(nn.Module):
    """No gradient, and always class 0."""

    def forward(self, x):
        return torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0]) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_greek_settings_norms_and_penalties_can_be_written():
    penalty = adv_lib.utils.lagrangian_penalties.all_penalties["P3"]
    for text, settings in (
        ("alma(τ=0.5, penalty='P3', num_steps=5)", {"τ": 0.5, "penalty": penalty, "num_steps": 5}),
        ("fmn(norm='linf')", {"norm": INF}),
    ):
        attack = as_attack(f"adv_lib:{text}")
        with seeded_globals(drawn_seed()):
            expected = getattr(adv_lib.attacks, text.partition("(")[0])(NETWORK, X.clone(), Y, **settings)
        assert torch.equal(run(attack, epsilon=0.0625, direct=True), expected)
        assert " at 0x" not in attack.description
    # The outer settings of partials count.
    inner = functools.partial(adv_lib.attacks.fmn, norm=2)
    for form in (functools.partial(inner, norm="linf"), (inner, {"norm": "linf"})):
        assert as_attack(form).description == attack.description


def test_attacks_end_where_there_is_nothing_to_find_or_one_value_suffices():
    # Gradients whose values share memory are copied, too.
    flat, one = Flat(), torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(attack_of("pgd_linf"), flat), X)
    attack = attack_of("str_attack", binary_search_steps=1, max_iterations=1, retrain=True)
    assert torch.equal(run(attack, flat, one), one)
    candidates = run(attack_of("fmn", norm=0), x=X[:1], epsilon=1.0)
    assert int((candidates != X[:1]).sum()) == 1
    assert predicted(NETWORK, candidates) != Y[:1]


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_single_rows_and_features_are_accepted_or_refused_with_a_reason(name):
    attack, flat = attack_of(name), uniform(ROWS, (144,))
    features = nn.Sequential(nn.Flatten(), conv_network((3, 8, 8))[3]).eval()
    assert run(attack, x=X[:1]).shape == X[:1].shape
    refused = (
        pytest.raises(AttackRefusedError, match=r"\(144,\); choose") if ENTRIES[name].dimensions else nullcontext()
    )
    with refused:
        assert run(attack, features, flat).shape == flat.shape


def record(attack, module, **ways):
    recorder = Recorder(module)
    run(attack, recorder, **ways)
    return recorder.queries[1:]  # After that for labels.


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
    ("df", {"norm": INF}, "single"),
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
    batches = record(attack, NETWORK)
    nearest = [torch.cdist(points.flatten(1), X.flatten(1)).argmin(1).tolist() for points in batches]
    assert all(one == list(range(ROWS)) for one in nearest) == (rows == "full")
    # An attack that is given epsilon stays in a ball of any size; one that is not leaves a small one.
    points = torch.cat(record(attack, NETWORK, epsilon=1e-3)).double().flatten(1)
    order = {"linf": INF, "l2": 2.0, "l1": 1.0}[attack.traits.norms[0]]
    farthest = torch.cdist(points, X.double().flatten(1), p=order).amin(1).max()
    tolerance = ThreatModel(norm=attack.traits.norms[0], epsilon=1e-3).tolerance(X[0].numel())
    assert bool(farthest > 1e-3 + tolerance) == attack.traits.leaves_ball


SEEDED = [("alma", {"init_lr_distance": 0.5}), ("fab", {"restarts": 2}), ("pdgd", {"random_init": 0})]
SEEDED += [(name, {"random_init": 0.1}) for name in ("pdgd", "pdpgd")]


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in sorted(ENTRIES)), *SEEDED])
def test_seeds_are_as_measured(name, settings):
    """Whether two seeds lead through different queries; without gradients, DDN and ALMA go in random directions."""
    attack, drawn = attack_of(name, **settings), []
    for module in (NETWORK, Flat()):
        one, other = (torch.cat(record(attack, module, seed=seed)) for seed in (1, 2))
        drawn.append(one.shape != other.shape or not torch.allclose(one, other, equal_nan=True))
    assert (attack.traits.seeds == "global") == any(drawn)
