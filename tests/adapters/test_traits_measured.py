"""What the catalogues state of every attack of every library, measured by a network that records its queries."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import verify
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.registry.base import adapters
from tests.adapters.common import LIBRARIES, UNIT, Recorder, cases, network_in, predicted, run, usable

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("uncompiled_brendel_bethge")]

SIDE = 8
EPSILONS = {"linf": 0.1, "l2": 0.8, "l1": 4.0}
# Foolbox's own, whose steps are of one size whatever the bounds, or which fills borders with 0.
IN_UNIT_BOUNDS = (
    *("DDNAttack", "EADAttack", "L2CarliniWagnerAttack", "NewtonFoolAttack", "SpatialAttack"),
    *(f"{norm}FMNAttack" for norm in ("LInf", "L2", "L1", "L0")),
)
# Whose optimizer is run in Python, which takes a hundred times as long.
SHORT = {f"{norm}BrendelBethgeAttack": {"steps": 8} for norm in ("L0", "L1", "L2", "Linfinity")}
LISTED = {
    library: [replace(one, trial={**one.trial, **SHORT.get(one.name, {})}) for one in usable(library)]
    for library in LIBRARIES
}


def every(*, when=lambda library, listing: True):
    """All attacks; the tests of one are run after another, so that they share what it did."""
    chosen = {library: [listing for listing in LISTED[library] if when(library, listing)] for library in LIBRARIES}
    params = [case for library in LIBRARIES for case in cases(chosen[library], library)]
    return pytest.mark.parametrize(("library", "listing"), params, scope="module")


def network_of(channels, classes, bounds):
    """A small network of images in any bounds: the same problem, stretched."""
    return network_in(bounds, (channels, SIDE, SIDE), classes, filters=6)


class Stubborn(nn.Sequential):
    """Class 0 everywhere, by far, with gradients."""

    def forward(self, x):
        logits = super().forward(x).tanh()
        return logits + 8 * (torch.arange(logits.shape[1]) == 0)


def images(channels=1, bounds=UNIT, seed=0):
    """Four smooth images, each unlike the others also when it is scaled, shifted by a pixel, or noisy."""
    ramp = torch.linspace(0, 1, SIDE)
    rows, columns = ramp.view(-1, 1).expand(SIDE, SIDE), ramp.expand(SIDE, SIDE)
    bump = torch.exp(-8 * ((rows - 0.5) ** 2 + (columns - 0.5) ** 2))
    patterns = torch.stack([rows, columns, bump, (rows * 6).sin() * (columns * 6).cos() / 2 + 0.5])
    noise = torch.rand(4, channels, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)) * 0.1
    return (0.1 + 0.7 * patterns[:, None] + noise) * (bounds[1] - bounds[0]) + bounds[0]


def build(library, listing, **settings):
    return adapters()[library].build_attack(listing.name, {**listing.trial, **settings}, name=listing.name)


def threat(attack, bounds=UNIT, epsilon=None):
    norm = attack.traits.norms[0]
    return ThreatModel(norm=norm, epsilon=(epsilon or EPSILONS[norm]) * (bounds[1] - bounds[0]), bounds=bounds)


def attacked(library, listing, *, classes=3, bounds=UNIT, **more):
    """The candidates of four images, the images, and what was queried."""
    attack, x = build(library, listing), images(listing.channels, bounds)
    network = network_of(listing.channels, classes, bounds)
    y = predicted(network, x)
    recorder = Recorder(more.pop("around", lambda module: module)(network)).eval()
    if more.pop("wrong", False):
        # A sample that is misclassified already makes attacks drop it.
        y[2] = (y[2] + 1) % classes
    before = x.clone()
    threat_model = threat(attack, bounds, more.pop("epsilon", None))
    candidates = run(attack, recorder, x, more.pop("labels", y), threat_model, classes=classes, direct=False, **more)
    assert torch.equal(x, before)
    assert (candidates.shape, candidates.dtype) == (x.shape, torch.float32)
    return candidates, x, recorder


@lru_cache(maxsize=2)
def usual(library, name):
    """What an attack does with all settings as they are."""
    return attacked(library, next(one for one in LISTED[library] if one.name == name))


def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@every()
def test_the_same_seed_gives_the_same_candidates_and_global_generators_are_left_alone(
    library, listing, capfd, monkeypatch
):
    clock = iter(range(10**9))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    random_state, before = np.random.RandomState, states()
    first, x, _ = attacked(library, listing)
    assert states() == before
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        assert torch.equal(usual(library, listing.name)[0], first)
    assert np.random.RandomState is random_state
    assert bool(torch.isfinite(first).all())
    assert float((first - first.clamp(0, 1)).abs().max()) <= 1e-5
    if listing.traits.seeds == "none":
        assert torch.equal(attacked(library, listing, seed=4)[0], first)
    assert capfd.readouterr() == ("", "")
    # Two classes are enough.
    assert bool(torch.isfinite(attacked(library, listing, classes=2)[0]).all())
    if listing.traits.failure in ("last", "best") and library != "art":
        assert not torch.equal(first, x)


@every()
@pytest.mark.parametrize("bounds", [(-1.0, 1.0), (0.0, 255.0)], ids=str)
def test_the_same_problem_in_other_bounds_is_as_hard(library, listing, bounds):
    unit, x, first = usual(library, listing.name)
    candidates, inputs, second = attacked(library, listing, bounds=bounds)
    width = bounds[1] - bounds[0]
    assert bool(torch.isfinite(candidates).all())
    assert float((candidates - candidates.clamp(*bounds)).abs().max()) <= 1e-5 * width
    if listing.name in IN_UNIT_BOUNDS and (bounds == (0.0, 255.0) or listing.name == "SpatialAttack"):
        return
    runs = ((first.module, unit, x), (second.module, candidates, inputs))
    found = [int((predicted(module, points) != predicted(module, start)).sum()) for module, points, start in runs]
    assert abs(found[0] - found[1]) <= 1
    distance = ThreatModel(norm=listing.traits.norms[0], epsilon=1.0).distance
    there, here = float(distance(unit, x).mean()), float(distance(candidates, inputs).mean()) / width
    assert here == pytest.approx(there, rel=0.5, abs=1e-6)


def alike(points, x):
    """The input that each point is most like, whatever its scale, brightness and margin."""
    inner = [part[..., 1:-1, 1:-1].flatten(1) for part in (points, x)]
    centered = [part - part.mean(1, keepdim=True) for part in inner]
    return nn.functional.cosine_similarity(centered[0][:, None], centered[1][None], dim=2).argmax(1)


def distances(points, x, norm):
    """To the nearest input, ``(M,)``."""
    apart = (points.flatten(1)[:, None] - x.flatten(1)[None]).double()
    return apart.norm(p={"linf": torch.inf, "l2": 2.0, "l1": 1.0}[norm], dim=2).amin(1).nan_to_num()


@every()
def test_queries_are_of_the_samples_that_batching_allows(library, listing):
    traits = listing.traits
    candidates, x, recorder = attacked(library, listing, classes=5, wrong=True)
    if library == "adv_lib":
        # What is misclassified already stays so.
        labels = predicted(recorder.module, torch.stack([candidates[2], x[2]]))
        assert labels[0] != (labels[1] + 1) % 5
    flat = x.flatten(1).double()
    half = torch.cdist(flat, flat).fill_diagonal_(torch.inf).min() / 2
    apart = [torch.cdist(points.flatten(1).double().nan_to_num(1e9), flat) for points in recorder.queries]
    nearest, clear = [one.argmin(1) for one in apart], [one.amin(1) < half for one in apart]
    order = torch.arange(4)
    if traits.batching == "full":
        assert set(recorder.sizes) <= {4}
    if traits.batching != "single":
        assert max(recorder.sizes, default=0) <= 4
        for n, c in zip(nearest, clear, strict=True):
            assert len(n) < 4 or bool((n == order)[c].all())
    elif library == "art":
        # The adapter passes samples one after the other.
        assert bool((torch.cat([n[c] for n, c in zip(nearest, clear, strict=True)]).diff() >= 0).all())
        assert all(len(set(n[c].tolist())) <= 1 for n, c in zip(nearest, clear, strict=True))
    whole = [len(points) == 4 and torch.equal(alike(points, x), order) for points in recorder.queries]
    if library == "torchattacks" or (library == "adv_lib" and traits.batching == "single"):
        assert all(whole) == (traits.batching == "full")
    if traits.batching == "full" and not traits.leaves_ball:
        assert all(whole)


def farthest(library, listing, epsilon):
    _, x, recorder = attacked(library, listing, epsilon=epsilon)
    norm = listing.traits.norms[0]
    return max((float(distances(points, x, norm).max()) for points in recorder.queries), default=0.0)


@every(when=lambda library, listing: not listing.traits.minimum_norm)
def test_what_is_given_epsilon_leaves_the_ball_only_where_stated(library, listing):
    epsilon = {"linf": 0.02, "l2": 0.1, "l1": 0.6}[listing.traits.norms[0]]
    if not listing.traits.leaves_ball:
        assert farthest(library, listing, epsilon) <= epsilon * (1 + 1e-3)
    elif library in ("torchattacks", "adv_lib") and listing.name != "AutoAttack":
        # FAB, which AutoAttack runs, leaves the ball where the boundary is far.
        assert farthest(library, listing, 1e-3) > 1.001e-3


@every(when=lambda library, listing: listing.traits.minimum_norm and not listing.traits.leaves_ball)
def test_minimum_norm_attacks_stay_near_what_they_return_where_stated(library, listing):
    candidates, x, recorder = usual(library, listing.name)
    norm = listing.traits.norms[0]
    final = distances(candidates, x, norm)
    points = torch.cat(recorder.queries)
    own = alike(points, x)
    reach = torch.stack([distances(points[own == row], x[[row]], norm).max() for row in range(4)])
    found = predicted(recorder.module, candidates) != predicted(recorder.module, x)
    assert bool(found.any()) or listing.name == "JSMA"
    assert bool((reach[found] <= 2 * final[found]).all())


@every()
def test_samples_on_which_it_fails_come_back_as_stated(library, listing):
    labels = torch.zeros(4, dtype=torch.int64)
    candidates, x, _ = attacked(library, listing, around=Stubborn, labels=labels)
    if listing.traits.failure in ("input", "start", "zeros", "raises"):
        # Threshold and Pixel return the input by way of 0..255.
        torch.testing.assert_close(candidates, x, rtol=0, atol=1e-6 if listing.name.startswith(("Thr", "Pixel")) else 0)
    elif library == "torchattacks" and listing.traits.failure == "last":
        assert all(not torch.equal(*pair) for pair in zip(candidates, x, strict=True))


def mixed(library, listing, seed, kept):
    """Candidates of the images that are kept and of others beside them, one of which is misclassified already."""
    network, x = network_of(listing.channels, 3, UNIT), images(listing.channels)
    others = images(listing.channels, seed=seed).roll(seed, 3)
    batch = torch.where(kept.view(-1, 1, 1, 1), x, others)
    y = predicted(network, batch)
    y[~kept] = (y[~kept] + (torch.arange(int((~kept).sum())) == seed % 4)) % 3
    attack = build(library, listing)
    return run(attack, network, batch, y, threat(attack), classes=3, direct=False)


@every(when=lambda library, listing: not listing.traits.batch_dependent)
def test_samples_influence_one_another_only_where_stated(library, listing):
    # Later samples get other draws where an earlier one is done sooner.
    for row in (0, 3) if listing.traits.seeds == "none" else (0,):
        kept = torch.arange(4) == row
        first, second = (mixed(library, listing, seed, kept)[row] for seed in (0, 5))
        torch.testing.assert_close(first, second, atol=1e-4, rtol=0)


PLANES = {"threshold": 0.2, "scale": 5.0, "offset": 0.0}
# As deep a search as finds the planted planes.
DEEP = {"alma": {"num_steps": 300}, "carlini_wagner_linf": {"max_iterations": 20}, "perc_al": {"max_iterations": 50}}
DEEP |= {key: {"num_steps": 100} for key in ("pdgd", "pdpgd", "sigma_zero")}
# These change at random, in few ways or in a metric of their own, or need more steps than a test should take.
TOO_WEAK = """
    AdversarialPatchNumpy CarliniL0Method LaserAttack ShadowAttack SpatialTransformation BinarizationRefinementAttack
    GaussianBlurAttack InversionAttack L2FMNAttack NewtonFoolAttack SpatialAttack GN VANILA
"""


@every()
def test_binarized_problems_are_solved(library, listing):
    """A boundary planted near each image; samples go together or one at a time, as batching states."""
    attack, x, outcomes = build(library, listing, **DEEP.get(listing.name, {})), images(listing.channels), []
    weight, threat_model = torch.randn(4, x[0].numel(), generator=torch.Generator().manual_seed(8)), threat(attack)
    for rows in torch.arange(4).split(1 if listing.traits.batching == "single" else 4):
        given, labels = x[rows], torch.zeros(len(rows), dtype=torch.int64)
        fixed = {key: torch.full((len(rows),), value) for key, value in PLANES.items()}
        planes = {"references": given, "weight": weight[rows], "anchor": given.flatten(1), **fixed}
        batching = "full" if listing.traits.batching == "full" else "any"
        module = BinarizedClassifier(nn.Flatten(), **planes, batching=batching)
        candidates = run(attack, module, given, labels, threat_model, classes=2, direct=False)
        outcomes += verify(
            candidates, given, labels, module=module, threat_model=threat_model, attack=attack.name
        ).outcomes
    assert set(outcomes) <= {"found", "not_adversarial", "beyond_epsilon"}
    if listing.name not in TOO_WEAK.split():
        assert outcomes.count("found") >= (3 if library == "adv_lib" else 1)
