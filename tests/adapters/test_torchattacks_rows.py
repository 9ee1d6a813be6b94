"""What the catalogue says of each class, measured by a module that notes what it is asked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks import Attack
from robust_ext.attacks.running import run_attack
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.verify import verify
from robust_ext.models.binarized import BinarizedClassifier
from robust_ext.registry import as_attack
from robust_ext.registry.base import AttackListing, adapters

torchattacks = pytest.importorskip("torchattacks", reason="torchattacks is not installed")

SIDE = 8
ROWS = 4
EPSILONS = {"linf": 0.05, "l2": 0.5, "l1": 4.0}
ORDERS = {"linf": math.inf, "l2": 2, "l1": 1}
LISTINGS = [listing for listing in adapters()["torchattacks"].list_attacks() if not listing.reason]
EVERY = pytest.mark.parametrize("listing", LISTINGS, ids=lambda listing: listing.name)


class Noting(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.asked: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x.detach().clone())
        out: Tensor = self.module(x)
        return out


class Unmoved(nn.Module):
    """Gradients, but always class 0."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.module(x).tanh()
        return logits + 8 * (torch.arange(logits.shape[1]) == 0)


def network(classes: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 32), nn.ReLU(), nn.Linear(32, classes)).eval()
        with torch.no_grad():
            module[1].weight.mul_(4)
    return module


def images(seed: int = 0) -> Tensor:
    """Four smooth images, each unlike the others also when it is scaled, shifted by a pixel, or noisy."""
    ramp = torch.linspace(0, 1, SIDE)
    rows, columns = ramp.view(-1, 1).expand(SIDE, SIDE), ramp.expand(SIDE, SIDE)
    bump = torch.exp(-8 * ((rows - 0.5) ** 2 + (columns - 0.5) ** 2))
    patterns = torch.stack([rows, columns, bump, (rows * 6).sin() * (columns * 6).cos() / 2 + 0.5])
    noise = torch.rand(patterns.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
    return (0.1 + 0.7 * patterns + noise)[:, None]


def build(listing: AttackListing) -> Attack:
    return adapters()["torchattacks"].build_attack(listing.name, listing.trial, name=listing.name)


def threat(attack: Attack) -> ThreatModel:
    norm = attack.traits.norms[0]
    return ThreatModel(norm=norm, epsilon=EPSILONS[norm])


def run(attack: Attack, module: nn.Module, x: Tensor, y: Tensor, *, classes: int = 3, seed: int = 3) -> Tensor:
    target = Target(
        module=module.eval(),
        bounds=(0.0, 1.0),
        classes=classes,
        input_shape=tuple(x.shape[1:]),
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(seed)
    return run_attack(attack, target, x, y, threat_model=threat(attack), generator=generator)


def alike(asked: Tensor, x: Tensor) -> Tensor:
    """The input that each asked image is most like, whatever its scale, brightness and margin."""
    inner = [part[..., 1:-1, 1:-1].flatten(1) for part in (asked, x)]
    centered = [part - part.mean(1, keepdim=True) for part in inner]
    return torch.nn.functional.cosine_similarity(centered[0][:, None], centered[1][None], dim=2).argmax(1)


def distances(asked: Tensor, x: Tensor, norm: str) -> Tensor:
    """To the nearest input, ``(M,)``."""
    apart = (asked.flatten(1)[:, None] - x.flatten(1)[None]).double()
    return apart.norm(p=ORDERS[norm], dim=2).amin(1)


@EVERY
def test_rows_are_treated_as_said(listing: AttackListing) -> None:
    attack = build(listing)
    x = images()
    module = Noting(network(3))
    y = network(3)(x).argmax(1)
    # A row that is misclassified already makes attacks drop it.
    y[2] = (y[2] + 1) % 3
    run(attack, module, x, y)
    full = [len(asked) == ROWS and torch.equal(alike(asked, x), torch.arange(ROWS)) for asked in module.asked]
    farthest = max((float(distances(asked, x, threat(attack).norm).max()) for asked in module.asked), default=0.0)
    near = farthest <= threat(attack).epsilon * (1 + 1e-4)
    if attack.traits.batching == "full":
        assert all(full)
    else:
        assert not all(full)
    if attack.traits.batching == "any":
        assert near
        assert all(len(asked) <= ROWS for asked in module.asked)
    if not attack.traits.minimum_norm:
        assert attack.traits.leaves_ball is not near


@pytest.mark.parametrize("listing", [entry for entry in LISTINGS if entry.traits.minimum_norm], ids=lambda e: e.name)
def test_minimum_norm_attacks_stay_near_what_they_return(listing: AttackListing) -> None:
    attack = build(listing)
    x = images()
    module = Noting(network(3))
    y = network(3)(x).argmax(1)
    candidates = run(attack, module, x, y)
    norm = threat(attack).norm
    found = network(3)(candidates).argmax(1) != y
    final = distances(candidates, x, norm)
    asked = torch.cat(module.asked)
    farthest = torch.stack([distances(asked[alike(asked, x) == row], x[[row]], norm).max() for row in range(ROWS)])
    assert bool(found.any())
    if not attack.traits.leaves_ball:
        assert bool((farthest[found] <= 2 * final[found]).all())


def test_fab_leaves_the_ball_where_the_boundary_is_far() -> None:
    attack = as_attack("torchattacks:FAB")
    x = images()
    module = Noting(network(3))
    y = network(3)(x).argmax(1)
    target = Target(
        module=module, bounds=(0.0, 1.0), classes=3, input_shape=(1, SIDE, SIDE), device=torch.device("cpu")
    )
    threat_model = ThreatModel(norm="linf", epsilon=0.0005)
    run_attack(attack, target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(0))
    assert max(float(distances(asked, x, "linf").max()) for asked in module.asked) > 2 * threat_model.epsilon
    for name in ("FAB", "AutoAttack", "AutoAttack(version='plus')", "MultiAttack(attacks=['FAB', 'PGD'])"):
        traits = as_attack(f"torchattacks:{name}").traits
        assert (traits.batching, traits.leaves_ball) == ("single", True)
    traits = as_attack("torchattacks:AutoAttack(version='rand')").traits
    assert (traits.batching, traits.leaves_ball, traits.minimum_classes) == ("any", False, 3)


@pytest.mark.parametrize(
    "listing", [entry for entry in LISTINGS if not entry.traits.batch_dependent], ids=lambda e: e.name
)
def test_rows_influence_one_another_only_where_said(listing: AttackListing) -> None:
    attack = build(listing)
    x, others = images(), images(seed=5).flip(3)
    y, wrong = network(3)(x).argmax(1), network(3)(others).argmax(1)
    wrong[2] = (wrong[2] + 1) % 3
    candidates = run(attack, network(3), x, y)
    # Later rows get other draws where an earlier one is done sooner.
    for row in range(ROWS) if attack.traits.seeds == "none" else (0,):
        kept = torch.arange(ROWS) == row
        mixed = run(attack, network(3), torch.where(kept.view(-1, 1, 1, 1), x, others), torch.where(kept, y, wrong))
        torch.testing.assert_close(mixed[row], candidates[row], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("CW(steps=50, c=1)", "l2"),
        ("EADL1(binary_search_steps=3, max_iterations=40, lr=0.1, initial_const=1)", "l1"),
        ("EADEN(binary_search_steps=3, max_iterations=40, lr=0.1, initial_const=1)", "l1"),
        ("APGDT(steps=20, norm='L2', seed=0)", "l2"),
    ],
)
def test_stopping_rules_and_step_sizes_are_shared_where_said(name: str, norm: str) -> None:
    attack = as_attack(f"torchattacks:{name}")
    x = images()
    y = network(3)(x).argmax(1)
    row = 1
    kept = (torch.arange(ROWS) == row).view(-1, 1, 1, 1)
    target = Target(
        module=network(3), bounds=(0.0, 1.0), classes=3, input_shape=(1, SIDE, SIDE), device=torch.device("cpu")
    )
    threat_model = ThreatModel(norm=norm, epsilon=0.3)
    results = []
    for seed in range(8):
        mixed = torch.where(kept, x, images(seed).roll(seed, 3))
        labels = network(3)(mixed).argmax(1)
        assert labels[row] == y[row]
        generator = torch.Generator().manual_seed(3)
        results.append(run_attack(attack, target, mixed, labels, threat_model=threat_model, generator=generator)[row])
    assert attack.traits.batch_dependent
    # More than rounding, which depends on the batch.
    assert max(float((result - results[0]).abs().max()) for result in results) > 1e-4


@EVERY
def test_failures_are_as_said(listing: AttackListing) -> None:
    attack = build(listing)
    x = images()
    candidates = run(attack, Unmoved(network(3)), x, torch.zeros(ROWS, dtype=torch.int64))
    if attack.traits.failure == "input":
        assert torch.equal(candidates, x)
    elif attack.traits.failure == "last":
        assert all(not torch.equal(*pair) for pair in zip(candidates, x, strict=True))
    else:
        assert attack.traits.failure == "best"


@EVERY
def test_the_same_seed_gives_the_same_candidates(
    listing: AttackListing, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**9))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    attack = build(listing)
    x = images()
    y = network(3)(x).argmax(1)
    state = torch.get_rng_state()
    candidates = run(attack, network(3), x, y)
    assert torch.equal(candidates, run(attack, network(3), x, y))
    assert torch.equal(state, torch.get_rng_state())
    others = [run(attack, network(3), x, y, seed=seed) for seed in (4, 5, 6)]
    # FAB draws only where it is started a second time.
    fixed = attack.traits.seeds == "none" or attack.name == "FAB"
    assert all(torch.equal(candidates, other) for other in others) == fixed
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


@EVERY
def test_every_attack_runs_on_binarized_problems(listing: AttackListing) -> None:
    attack = build(listing)
    x = images()
    weight = torch.randn(ROWS, SIDE * SIDE, generator=torch.Generator().manual_seed(8))

    def classifier(rows: Tensor) -> BinarizedClassifier:
        count = len(rows)
        return BinarizedClassifier(
            nn.Flatten(),
            references=x[rows],
            weight=weight[rows],
            anchor=x[rows].flatten(1),
            threshold=torch.full((count,), 0.2),
            scale=torch.full((count,), 5.0),
            offset=torch.zeros(count),
            batching="full" if attack.traits.batching == "full" else "any",
        )

    groups = [torch.arange(ROWS)] if attack.traits.batching != "single" else list(torch.arange(ROWS).split(1))
    for rows in groups:
        labels = torch.zeros(len(rows), dtype=torch.int64)
        module = classifier(rows)
        candidates = run(attack, module, x[rows], labels, classes=2)
        checked = verify(candidates, x[rows], labels, module=module, threat_model=threat(attack), attack=attack.name)
        assert set(checked.outcomes) <= {"found", "not_adversarial", "beyond_epsilon"}
        # These change at random, or do next to nothing, or can change single values only.
        if attack.name not in ("GN", "VANILA", "SPSA", "OnePixel", "Pixle", "SparseFool", "JSMA", "TPGD"):
            assert "found" in checked.outcomes
