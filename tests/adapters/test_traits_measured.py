"""What the catalogues state of every attack of every library, measured by a network that records its queries."""

import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext.core.threat import ThreatModel
from robust_ext.registry.base import adapters
from tests.adapters.common import LIBRARIES, UNIT, Recorder, cases, network_in, predicted, run, usable

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("uncompiled_brendel_bethge")]

SIDE = 8
EPSILONS = {"linf": 0.1, "l2": 0.8, "l1": 4.0}
# Foolbox's own, whose steps are of one size in all bounds, or which fills borders with 0.
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


def network_of(channels, classes=3, bounds=UNIT):
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


def threat(listing, bounds=UNIT, epsilon=None):
    norm = listing.traits.norms[0]
    return ThreatModel(norm=norm, epsilon=(epsilon or EPSILONS[norm]) * (bounds[1] - bounds[0]), bounds=bounds)


def attack_on(library, listing, module, x, y, *, classes=3, bounds=UNIT, epsilon=None, seed=3):
    attack = adapters()[library].build_attack(listing.name, listing.trial, name=listing.name)
    threat_model = threat(listing, bounds, epsilon)
    # What a version of AutoAttack runs, and what a MultiAttack holds, decides on its traits.
    assert attack.traits == listing.traits or listing.name in ("AutoAttack", "MultiAttack")
    assert "at 0x" not in attack.description
    return run(attack, module, x, y, threat_model, classes=classes, direct=False, seed=seed)


def attacked(library, listing, *, around=nn.Sequential, labels=None, wrong=False, classes=3, bounds=UNIT, **ways):
    """The candidates of four images, the images, and the network with its queries."""
    x, network = images(listing.channels, bounds), network_of(listing.channels, classes, bounds)
    y = predicted(network, x) if labels is None else labels
    recorder = Recorder(around(network)).eval()
    if wrong:
        # Attacks drop a sample that is misclassified already.
        y[2] = (y[2] + 1) % classes
    before = x.clone()
    candidates = attack_on(library, listing, recorder, x, y, classes=classes, bounds=bounds, **ways)
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
def test_the_same_problem_in_other_bounds_is_as_hard(library, listing):
    # What Foolbox does in bounds other than (0, 1) is compared with (-1, 1) where larger ones are too many steps away.
    bounds = (-1.0, 1.0) if listing.name in IN_UNIT_BOUNDS else (0.0, 255.0)
    unit, x, first = usual(library, listing.name)
    candidates, inputs, second = attacked(library, listing, bounds=bounds)
    width = bounds[1] - bounds[0]
    assert bool(torch.isfinite(candidates).all())
    assert float((candidates - candidates.clamp(*bounds)).abs().max()) <= 1e-5 * width
    if listing.name == "SpatialAttack":
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
    whole = [len(points) == 4 and torch.equal(alike(points, x), torch.arange(4)) for points in recorder.queries]
    if library == "torchattacks" or (library == "adv_lib" and traits.batching == "single"):
        assert all(whole) == (traits.batching == "full")
    if traits.batching == "full":
        assert all(whole) if not traits.leaves_ball else set(recorder.sizes) <= {4}
    elif library == "art" and traits.batching == "single":
        # The adapter passes samples one after the other; points far from all tell nothing.
        flat = x.flatten(1).double()
        half = torch.cdist(flat, flat).fill_diagonal_(torch.inf).min() / 2
        apart = [torch.cdist(points.flatten(1).double().nan_to_num(1e9), flat) for points in recorder.queries]
        assert all(len(one.argmin(1)[one.amin(1) < half].unique()) <= 1 for one in apart)


@every(when=lambda library, listing: not listing.traits.minimum_norm)
def test_what_is_given_epsilon_leaves_the_ball_only_where_stated(library, listing):
    norm, leaves = listing.traits.norms[0], listing.traits.leaves_ball
    epsilon = 1e-3 if leaves else {"linf": 0.02, "l2": 0.1, "l1": 0.6}[norm]
    _, x, recorder = attacked(library, listing, epsilon=epsilon)
    farthest = max((float(distances(points, x, norm).max()) for points in recorder.queries), default=0.0)
    # FAB, which AutoAttack runs, leaves the ball where the boundary is far.
    if not leaves or (library in ("torchattacks", "adv_lib") and listing.name != "AutoAttack"):
        assert (farthest > epsilon * (1 + 1e-3)) == leaves


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


@every(when=lambda library, listing: not listing.traits.batch_dependent)
def test_samples_influence_one_another_only_where_stated(library, listing):
    network, x, order = network_of(listing.channels), images(listing.channels), torch.arange(4)
    # Later samples get other draws where an earlier one is done sooner.
    for row in (0, 3) if listing.traits.seeds == "none" else (0,):
        found = []
        for seed in (0, 5):
            # Other images beside the one that is kept, one of which is misclassified already.
            others = images(listing.channels, seed=seed).roll(seed, 3)
            batch = torch.where((order == row).view(-1, 1, 1, 1), x, others)
            y = predicted(network, batch)
            y[order != row] = (y[order != row] + (torch.arange(3) == seed % 4)) % 3
            found.append(attack_on(library, listing, network, batch, y)[row])
        torch.testing.assert_close(*found, atol=1e-4, rtol=0)
