from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks import Attack
from robust_ext.attacks.base import draw_seed
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack

pytest.importorskip("eagerpy", reason="Foolbox is not installed")
# Foolbox warns when it is imported; the adapter's import keeps that warning away, which is narrower than a filter here.
from robust_ext.adapters.foolbox.library import foolbox

BOUNDS = [(0.0, 1.0), (-1.0, 1.0)]


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 8 * 8, 5)).eval()


def batch(bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    x = torch.rand(6, 1, 10, 10, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]
    return x, network()(x).argmax(1)


def run(attack: Attack, module: nn.Module, x: Tensor, y: Tensor, threat_model: ThreatModel, seed: int = 3) -> Tensor:
    target = Target(
        module=module, bounds=threat_model.bounds, classes=5, input_shape=(1, 10, 10), device=torch.device("cpu")
    )
    return attack.search(target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(seed))


def host(
    attack: Any, x: Tensor, y: Tensor, bounds: tuple[float, float], epsilons: float | None, seed: int = 3
) -> Tensor:
    with seeded_globals(draw_seed(torch.Generator().manual_seed(seed))):
        model = foolbox.PyTorchModel(network(), bounds=bounds, device="cpu")
        clipped: Tensor = attack(model, x.clone(), y, epsilons=epsilons)[1]
    return clipped


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    ("norm", "call", "settings"),
    [
        ("linf", "LinfPGD", {"steps": 7, "rel_stepsize": 0.1}),
        ("linf", "PGD", {"steps": 3}),
        ("l2", "L2PGD", {"steps": 5}),
        ("l1", "L1PGD", {"steps": 5}),
        ("linf", "FGSM", {"random_start": True}),
        ("linf", "LinfRepeatedAdditiveUniformNoiseAttack", {"repeats": 3}),
    ],
)
def test_fixed_epsilon_attacks_equal_foolbox(
    bounds: tuple[float, float], norm: str, call: str, settings: dict[str, Any]
) -> None:
    x, y = batch(bounds)
    threat_model = ThreatModel(norm=norm, epsilon=0.125, bounds=bounds)
    attack = as_attack(f"foolbox:{call}({', '.join(f'{key}={value}' for key, value in settings.items())})")
    candidates = run(attack, network(), x, y, threat_model)
    assert torch.equal(candidates, host(getattr(foolbox.attacks, call)(**settings), x, y, bounds, 0.125))
    assert bool(threat_model.contains(candidates, x).all())
    assert not torch.equal(candidates, x)
    assert not attack.traits.minimum_norm
    assert (attack.traits.norms, attack.traits.batching) == ((norm,), "full")


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize(
    ("norm", "call", "settings"),
    [
        ("l2", "L2DeepFoolAttack", {"steps": 20}),
        ("linf", "LinfDeepFoolAttack", {"steps": 20}),
        ("l2", "L2CarliniWagnerAttack", {"steps": 40, "binary_search_steps": 3, "initial_const": 10.0}),
        ("l2", "BoundaryAttack", {"steps": 10}),
    ],
)
def test_minimum_norm_attacks_equal_foolbox_and_are_not_clipped(
    bounds: tuple[float, float], norm: str, call: str, settings: dict[str, Any]
) -> None:
    x, y = batch(bounds)
    threat_model = ThreatModel(norm=norm, epsilon=1e-3, bounds=bounds)
    attack = as_attack(f"foolbox:{call}({', '.join(f'{key}={value}' for key, value in settings.items())})")
    candidates = run(attack, network(), x, y, threat_model)
    assert torch.equal(candidates, host(getattr(foolbox.attacks, call)(**settings), x, y, bounds, None))
    assert float(threat_model.distance(candidates, x).min()) > threat_model.epsilon
    assert attack.traits.minimum_norm
    assert attack.traits.norms == (norm,)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_flexible_distances_follow_the_threat_model(norm: str) -> None:
    x, y = batch((0.0, 1.0))
    threat_model = ThreatModel(norm=norm, epsilon=0.1)
    distance = getattr(foolbox.distances, norm)
    attack = as_attack("foolbox:HopSkipJumpAttack(steps=2, max_gradient_eval_steps=20)")
    expected = foolbox.attacks.HopSkipJumpAttack(steps=2, max_gradient_eval_steps=20, constraint=norm)
    assert torch.equal(run(attack, network(), x, y, threat_model), host(expected, x, y, (0.0, 1.0), None))
    mine = foolbox.attacks.InversionAttack()
    expected = foolbox.attacks.InversionAttack(distance=distance)
    assert torch.equal(run(as_attack(mine), network(), x, y, threat_model), host(expected, x, y, (0.0, 1.0), None))
    assert mine._distance is None


def test_settings_fix_the_norm_of_hopskipjump() -> None:
    attack = as_attack("foolbox:HopSkipJumpAttack(constraint='linf')")
    assert attack.traits.norms == ("linf",)
    with pytest.raises(AttackRefusedError, match="works for linf"):
        attack.check(threat_model=ThreatModel(norm="l2", epsilon=1.0))


def test_objects_classes_and_tuples_are_equivalent() -> None:
    x, y = batch((0.0, 1.0))
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    expected = host(foolbox.attacks.LinfPGD(steps=4), x, y, (0.0, 1.0), 0.1)
    for form in (foolbox.attacks.LinfPGD(steps=4), (foolbox.attacks.LinfPGD, {"steps": 4})):
        assert torch.equal(run(as_attack(form), network(), x, y, threat_model), expected)
    bare = as_attack(foolbox.attacks.LinfPGD)
    expected = host(foolbox.attacks.LinfPGD(), x, y, (0.0, 1.0), 0.1)
    assert torch.equal(run(bare, network(), x, y, threat_model), expected)
    assert as_attack(foolbox.attacks.LinfPGD, name="mine").name == "mine"


def test_repeated_attacks_keep_what_they_repeat() -> None:
    x, y = batch((0.0, 1.0))
    repeated = foolbox.attacks.LinfPGD(steps=1).repeat(3)
    expected = host(repeated, x, y, (0.0, 1.0), 0.01)
    attack = as_attack(repeated)
    assert torch.equal(run(attack, network(), x, y, ThreatModel(norm="linf", epsilon=0.01)), expected)
    assert attack.traits.norms == ("linf",)
    flexible = as_attack(foolbox.attacks.LinearSearchBlendedUniformNoiseAttack(directions=100, steps=20).repeat(2))
    assert flexible.traits.minimum_norm
    assert run(flexible, network(), x, y, ThreatModel(norm="l1", epsilon=0.1)).shape == x.shape


def test_runs_depend_on_the_generator_only() -> None:
    x, y = batch((0.0, 1.0))
    attack, threat_model = as_attack("foolbox:LinfPGD(steps=1)"), ThreatModel(norm="linf", epsilon=0.1)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = run(attack, network(), x, y, threat_model)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(run(attack, network(), x, y, threat_model), first)
    assert not torch.equal(run(attack, network(), x, y, threat_model, seed=4), first)


def test_attacks_of_others_go_one_row_at_a_time() -> None:
    class Mine(foolbox.attacks.LinfFastGradientAttack):  # type: ignore[misc]
        pass

    attack = as_attack(Mine())
    assert (attack.traits.batching, attack.traits.norms, attack.traits.gradients) == ("single", ("linf",), True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("foolbox:LinfPDG", "did you mean LinfPGD"),
        ("foolbox:LinfPGD(step=3)", r"one of: rel_stepsize, .*did you mean steps\?"),
        ("foolbox:VirtualAdversarialAttack", r"VirtualAdversarialAttack\(steps=\.\.\., \.\.\.\)"),
        ("foolbox:HopSkipJumpAttack(constraint='l7')", "settings it accepts; Foolbox raised AssertionError"),
        ("foolbox:DatasetAttack", "other samples that it was fed"),
        ("foolbox:Attack", "base class"),
    ],
)
def test_what_cannot_be_built_is_explained(text: str, expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        as_attack(text)


def test_things_of_foolbox_that_are_no_attack_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="one of the attacks"):
        as_attack(foolbox.distances.l2)
    with pytest.raises(InvalidArgumentError, match="dict of keyword arguments"):
        as_attack((foolbox.attacks.LinfPGD, 3))


def test_failures_inside_name_the_attack() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no answer")

    x, y = batch((0.0, 1.0))
    with pytest.raises(AttackError, match="foolbox:FGSM: Foolbox raised RuntimeError: no answer"):
        run(as_attack("foolbox:FGSM"), Broken().eval(), x, y, ThreatModel(norm="linf", epsilon=0.1))
    with pytest.raises(AttackError, match=r"AssertionError: assert .*the inputs must lie in the target's bounds"):
        run(as_attack("foolbox:FGSM"), network(), x + 2, y, ThreatModel(norm="linf", epsilon=0.1))


def test_importing_the_adapter_imports_no_foolbox() -> None:
    code = (
        "import sys; from robust_ext.registry.base import adapters; adapters(); "
        "assert not {'foolbox', 'art'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
