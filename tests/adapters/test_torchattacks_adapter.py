from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks import Attack
from robust_ext.attacks.base import draw_seed
from robust_ext.attacks.running import run_attack
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack
from robust_ext.registry.base import adapters

torchattacks = pytest.importorskip("torchattacks", reason="torchattacks is not installed")

SHAPE = (3, 8, 8)
CLASSES = 10


class Shifted(nn.Module):
    """A network of inputs in [0, 1], of inputs in other bounds."""

    def __init__(self, module: nn.Module, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.module, self.bounds = module, bounds

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module((x - self.bounds[0]) / (self.bounds[1] - self.bounds[0]))
        return out


class Stretched(nn.Module):
    """By hand, what lies between torchattacks' [0, 1] and a module of other bounds."""

    def __init__(self, module: nn.Module, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.module, self.bounds = module, bounds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x * (self.bounds[1] - self.bounds[0]) + self.bounds[0])
        return out


class Counting(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.rows, self.calls = module, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.rows += len(x)
        self.calls += 1
        out: Tensor = self.module(x)
        return out


def network(classes: int = CLASSES, shape: tuple[int, ...] = SHAPE) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = int(torch.Size(shape).numel())
        module = nn.Sequential(nn.Flatten(), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, classes)).eval()
        with torch.no_grad():
            module[1].weight.mul_(4)
    return module


def batch(module: nn.Module, bounds: tuple[float, float] = (0.0, 1.0), rows: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]
    return x, module(x).argmax(1)


def target_of(module: nn.Module, bounds: tuple[float, float] = (0.0, 1.0), classes: int = CLASSES) -> Target:
    return Target(module=module, bounds=bounds, classes=classes, input_shape=SHAPE, device=torch.device("cpu"))


def run(attack: Attack, module: nn.Module, x: Tensor, y: Tensor, threat_model: ThreatModel, **extra: Any) -> Tensor:
    target = target_of(module, threat_model.bounds, **extra)
    return run_attack(attack, target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(3))


def by_hand(name: str, module: nn.Module, x: Tensor, y: Tensor, settings: dict[str, Any]) -> Tensor:
    with seeded_globals(draw_seed(torch.Generator().manual_seed(3))):
        out: Tensor = getattr(torchattacks, name)(module, **settings)(x, y)
    return out.detach()


LINF, L2, L1 = ("linf", 0.0625), ("l2", 0.5), ("l1", 4.0)
EPS = {"eps": 0.0625}
HOSTS: list[tuple[tuple[str, float], str, dict[str, Any], dict[str, Any]]] = [
    (LINF, "FGSM", {}, EPS),
    (LINF, "PGD", {"steps": 4}, EPS),
    (LINF, "BIM", {"steps": 4}, EPS),
    (LINF, "RFGSM", {"steps": 4}, EPS),
    (LINF, "EOTPGD", {"steps": 3}, EPS),
    (LINF, "FFGSM", {}, EPS),
    (LINF, "TPGD", {"steps": 4}, EPS),
    (LINF, "MIFGSM", {"steps": 4}, EPS),
    (LINF, "UPGD", {"steps": 4, "loss": "dlr", "random_start": True}, EPS),
    (LINF, "DIFGSM", {"steps": 4}, EPS),
    (LINF, "TIFGSM", {"steps": 4}, EPS),
    (LINF, "Jitter", {"steps": 4}, EPS),
    (LINF, "NIFGSM", {"steps": 4}, EPS),
    (LINF, "PGDRS", {"steps": 3, "noise_sd": 0.25}, EPS),
    (LINF, "SINIFGSM", {"steps": 3}, EPS),
    (LINF, "VMIFGSM", {"steps": 3}, EPS),
    (LINF, "VNIFGSM", {"steps": 3}, EPS),
    (LINF, "SPSA", {"nb_sample": 8, "nb_iter": 2}, EPS),
    (LINF, "PIFGSM", {"num_iter_set": 3}, {"max_epsilon": 0.0625}),
    (LINF, "PIFGSMPP", {"num_iter_set": 3}, {"max_epsilon": 0.0625}),
    (LINF, "APGD", {"steps": 5, "seed": 7}, EPS),
    (L2, "APGD", {"steps": 5, "seed": 7, "loss": "dlr"}, {"eps": 0.5, "norm": "L2"}),
    (LINF, "APGDT", {"steps": 5, "seed": 7}, EPS),
    (LINF, "FAB", {"steps": 5, "seed": 7, "n_restarts": 2}, EPS),
    (LINF, "FAB", {"steps": 3, "seed": 7, "multi_targeted": True}, EPS),
    (L2, "Square", {"n_queries": 20, "seed": 7}, {"eps": 0.5, "norm": "L2"}),
    (LINF, "AutoAttack", {"version": "rand", "seed": 7}, EPS),
    (L2, "PGDL2", {"steps": 4}, {"eps": 0.5}),
    (L2, "PGDRSL2", {"steps": 3}, {"eps": 0.5}),
    (L2, "DeepFool", {"steps": 10}, {}),
    (L1, "JSMA", {}, {}),
    (L1, "SparseFool", {"steps": 3}, {}),
    (L1, "OnePixel", {"steps": 3}, {}),
    (L1, "Pixle", {"restarts": 2, "max_iterations": 5}, {}),
    (L2, "GN", {"std": 0.05}, {}),
    (L2, "VANILA", {}, {}),
]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0)])
@pytest.mark.parametrize(("ball", "name", "settings", "given"), HOSTS)
def test_candidates_equal_those_of_torchattacks(
    ball: tuple[str, float],
    name: str,
    settings: dict[str, Any],
    given: dict[str, Any],
    bounds: tuple[float, float],
) -> None:
    width = bounds[1] - bounds[0]
    module = network() if bounds == (0.0, 1.0) else Shifted(network(), bounds).eval()
    x, y = batch(module, bounds)
    threat_model = ThreatModel(norm=ball[0], epsilon=ball[1] * width, bounds=bounds)
    shown = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    candidates = run(as_attack(f"torchattacks:{name}({shown})"), module, x, y, threat_model)
    if bounds == (0.0, 1.0):
        expected = by_hand(name, module, x, y, {**settings, **given})
    else:
        unit = (x - bounds[0]) / width
        out = by_hand(name, Stretched(module, bounds).eval(), unit, y, {**settings, **given})
        expected = torch.where(out == unit, x, (out * width + bounds[0]).clamp(*bounds))
    assert torch.equal(candidates, expected)
    assert candidates.dtype == torch.float32
    assert torch.equal(candidates, x) == (name == "VANILA")


@pytest.mark.parametrize(
    ("name", "ball", "settings"),
    [
        ("CW", L2, {"steps": 20, "c": 10, "lr": 0.05}),
        ("EADL1", L1, {"binary_search_steps": 4, "max_iterations": 50, "lr": 0.02, "initial_const": 0.01}),
        ("EADEN", L1, {"binary_search_steps": 4, "max_iterations": 50, "lr": 0.02, "initial_const": 0.01}),
        ("UPGD", LINF, {"steps": 3, "loss": "margin", "eps": 0.0625}),
    ],
)
def test_attacks_that_mask_logits_by_zeros_equal_torchattacks_on_logits_above_zero(
    name: str, ball: tuple[str, float], settings: dict[str, Any]
) -> None:
    module = network()
    x, y = batch(module)
    threat_model = ThreatModel(norm=ball[0], epsilon=ball[1])
    candidates = run(as_attack((getattr(torchattacks, name), settings)), module, x, y, threat_model)

    class Positive(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = super().forward(x)
            return logits - logits.min(1, keepdim=True).values.detach()

    assert torch.equal(candidates, by_hand(name, Positive(module).eval(), x, y, settings))
    assert bool((module(candidates).argmax(1) != y).any())


@pytest.mark.parametrize(("name", "calls"), [("FGSM", 1), ("PGD(steps=7)", 7), ("EOTPGD(steps=3, eot_iter=4)", 12)])
def test_queries_are_those_of_the_attack(name: str, calls: int) -> None:
    module = Counting(network()).eval()
    x, y = batch(module)
    module.rows = module.calls = 0
    run(as_attack(f"torchattacks:{name}"), module, x, y, ThreatModel(norm="linf", epsilon=0.05))
    assert (module.calls, module.rows) == (calls, 4 * calls)


@pytest.mark.parametrize("name", ["Square(n_queries=15, seed=1)", "APGDT(steps=4, seed=1)", "FAB(steps=4, seed=1)"])
def test_queries_are_as_many_as_by_hand(name: str) -> None:
    attack = as_attack(f"torchattacks:{name}")
    here, there = Counting(network()).eval(), Counting(network()).eval()
    x, y = batch(here)
    batch(there)
    run(attack, here, x, y, ThreatModel(norm="linf", epsilon=0.01))
    settings = {**attack.settings, "eps": 0.01}  # type: ignore[attr-defined]
    by_hand(name.split("(", maxsplit=1)[0], there, x, y, settings)
    assert (here.calls, here.rows) == (there.calls, there.rows)
    assert here.calls > 5


def made(attack: Attack, threat_model: ThreatModel, classes: int = CLASSES) -> Any:
    """The torchattacks object that is made for a target."""
    seen: list[Any] = []
    kind = attack.made_of  # type: ignore[attr-defined]
    forward = kind.forward

    def note(self: Any, *arguments: Any) -> Any:
        seen.append(self)
        return forward(self, *arguments)

    module = network(classes)
    x, y = batch(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", note)
        target = Target(
            module=module,
            bounds=threat_model.bounds,
            classes=classes,
            input_shape=SHAPE,
            device=torch.device("cpu"),
        )
        attack.search(target, x, y, threat_model=threat_model, generator=torch.Generator().manual_seed(3))
    return seen[0]


@pytest.mark.parametrize(
    ("name", "epsilon", "alpha"),
    [
        # torchattacks' 2/255 is below epsilon.
        ("PGD", 0.3, 2 / 255),
        # It is not: 2.5 epsilon over 10 steps, a tenth of epsilon over 100, and never more than epsilon.
        ("PGD", 0.004, 0.001),
        ("PGD(steps=100)", 0.004, 0.0004),
        ("PGD(steps=1)", 0.004, 0.004),
        ("PGD(alpha=0.5)", 0.004, 0.5),
        ("FFGSM", 8 / 255, 10 / 255),
        ("FFGSM", 0.004, 0.005),
        ("FFGSM", 0.3, 10 / 255),
    ],
)
def test_step_sizes_fit_epsilon(name: str, epsilon: float, alpha: float) -> None:
    attack = made(as_attack(f"torchattacks:{name}"), ThreatModel(norm="linf", epsilon=epsilon))
    assert attack.alpha == pytest.approx(alpha, rel=1e-9)
    assert attack.eps == epsilon


def test_epsilon_is_in_units_of_zero_to_one() -> None:
    threat_model = ThreatModel(norm="linf", epsilon=8.0, bounds=(0.0, 255.0))
    assert made(as_attack("torchattacks:BIM"), threat_model).eps == pytest.approx(8 / 255)


def test_set_values_are_kept_and_differences_logged(caplog: pytest.LogCaptureFixture) -> None:
    threat_model = ThreatModel(norm="l2", epsilon=0.5)
    with caplog.at_level(logging.WARNING):
        attack = made(as_attack("torchattacks:APGD(eps=0.25, norm='Linf', steps=2)"), threat_model)
    assert (attack.eps, attack.norm) == (0.25, "Linf")
    assert [record.args[1] for record in caplog.records if record.args] == ["eps", "norm"]  # type: ignore[index]
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        made(as_attack("torchattacks:PGD(eps=8/255, steps=1)"), ThreatModel(norm="linf", epsilon=8 / 255))
    assert not caplog.records


@pytest.mark.parametrize(
    ("classes", "given", "used"), [(4, "", 4), (10, "", 10), (12, "", 10), (12, "n_classes=12", 12)]
)
def test_class_counts_follow_the_target(classes: int, given: str, used: int) -> None:
    attack = made(as_attack(f"torchattacks:APGDT({given})"), ThreatModel(norm="linf", epsilon=0.001), classes)
    assert attack.n_target_classes == used - 1


def test_an_object_is_bound_to_the_target_and_its_model_not_asked() -> None:
    old = Counting(network()).eval()
    attack = as_attack(torchattacks.PGD(old, eps=0.25, alpha=0.125, steps=4))
    module = network()
    x, y = batch(module)
    threat_model = ThreatModel(norm="linf", epsilon=0.25)
    candidates = run(attack, module, x, y, threat_model)
    assert old.calls == 0
    assert torch.equal(candidates, by_hand("PGD", module, x, y, {"eps": 0.25, "alpha": 0.125, "steps": 4}))
    assert attack.description == "torchattacks PGD(alpha=0.125, eps=0.25, steps=4)"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("APGD", {"rho": 0.5, "seed": 4, "norm": "L2", "loss": "dlr", "eot_iter": 2}),
        ("APGDT", {"rho": 0.5, "n_restarts": 2}),
        ("FAB", {"multi_targeted": True, "alpha_max": 0.2}),
        ("Square", {"resc_schedule": False, "p_init": 0.3, "loss": "ce"}),
        (
            "Pixle",
            {"x_dimensions": (1, 3), "y_dimensions": (0.1, 0.2), "max_iterations": 7, "pixel_mapping": "distance"},
        ),
        ("PGDRS", {"noise_type": "uniform", "noise_sd": 0.25, "noise_batch_size": 3, "batch_max": 7}),
        ("PGDRSL2", {"noise_sd": 0.25, "eps_for_division": 1e-6}),
        ("TIFGSM", {"kernel_name": "linear", "len_kernel": 5, "resize_rate": 0.5}),
        ("SPSA", {"delta": 0.5, "nb_sample": 3, "max_batch_size": 2}),
        ("EADL1", {"kappa": 1, "initial_const": 0.5, "abort_early": False}),
        ("VMIFGSM", {"N": 2, "beta": 0.5}),
        ("PIFGSMPP", {"project_factor": 0.5, "max_epsilon": 0.5}),
        ("JSMA", {"theta": 0.5, "gamma": 0.25}),
        ("OnePixel", {"pixels": 3, "inf_batch": 5}),
        ("AutoAttack", {"version": "plus", "seed": 3}),
    ],
)
def test_every_setting_of_an_object_is_read_back(name: str, settings: dict[str, Any]) -> None:
    attack = as_attack(getattr(torchattacks, name)(network(), **settings))
    assert attack.settings == settings  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(set(torchattacks.__all__) - {"LGV", "MultiAttack"}))
def test_an_object_of_default_settings_has_none_to_read_back(name: str) -> None:
    assert as_attack(getattr(torchattacks, name)(network())).settings == {}  # type: ignore[attr-defined]


def test_multi_attack_binds_its_parts_anew() -> None:
    old = Counting(network()).eval()
    parts = [torchattacks.FGSM(old, eps=0.03), torchattacks.PGD(old, eps=0.03, steps=3)]
    attack = as_attack(torchattacks.MultiAttack(parts))
    module = network()
    x, y = batch(module)
    candidates = run(attack, module, x, y, ThreatModel(norm="linf", epsilon=0.03))
    assert old.calls == 0
    with seeded_globals(draw_seed(torch.Generator().manual_seed(3))):
        new = [torchattacks.FGSM(module, eps=0.03), torchattacks.PGD(module, eps=0.03, steps=3)]
        expected = torchattacks.MultiAttack(new)(x, y)
    assert torch.equal(candidates, expected)
    assert attack.traits.batching == "any"
    assert attack.description == (
        "torchattacks MultiAttack(attacks=[torchattacks FGSM(eps=0.03), torchattacks PGD(eps=0.03, steps=3)])"
    )


def test_multi_attack_takes_what_its_parts_need() -> None:
    text = as_attack("torchattacks:MultiAttack(attacks=['APGDT(steps=2)', 'torchattacks:Square(n_queries=3)'])")
    assert (text.traits.batching, text.traits.minimum_classes, text.traits.norms) == ("any", 4, ("linf", "l2"))
    mixed = as_attack((torchattacks.MultiAttack, {"attacks": [torchattacks.PGD, (torchattacks.FAB, {"steps": 2})]}))
    assert (mixed.traits.batching, mixed.traits.leaves_ball, mixed.traits.norms) == ("single", True, ("linf",))
    with pytest.raises(InvalidArgumentError, match=r"norm in common"):
        as_attack("torchattacks:MultiAttack(attacks=['PGD', 'PGDL2'])")
    with pytest.raises(InvalidArgumentError, match="names, classes or objects"):
        as_attack("torchattacks:MultiAttack(attacks=[1, 2])")


@pytest.mark.parametrize("mode", ["random", "least_likely", "by_label", "by_function"])
def test_targeted_objects_are_refused(mode: str) -> None:
    attack = torchattacks.PGD(network())
    arguments = [lambda x, y: y] if mode == "by_function" else []
    getattr(attack, f"set_mode_targeted_{mode}")(*arguments, quiet=True)
    with pytest.raises(InvalidArgumentError, match="the default mode"):
        as_attack(attack)
    attack.targeted = False
    assert as_attack(attack).name == "PGD"


def test_normalization_of_the_old_model_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    plain, normalized = torchattacks.FGSM(network()), torchattacks.FGSM(network())
    normalized.set_normalization_used(mean=[0.5] * 3, std=[0.25] * 3)
    module = network()
    x, y = batch(module)
    threat_model = ThreatModel(norm="linf", epsilon=0.05)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(
            run(as_attack(normalized), module, x, y, threat_model), run(as_attack(plain), module, x, y, threat_model)
        )
    assert "set_normalization_used" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torchattacks:LGV", "trains copies of the network"),
        ("torchattacks:PDG", "did you mean PGD"),
        ("torchattacks:wrappers", "robust-ext attacks lists them"),
        ("torchattacks:PGD(epsilon=1)", "did you mean eps"),
        ("torchattacks:FAB(norm='L1')", "a norm among Linf, L2"),
        ("torchattacks:Square(norm='inf')", "a norm among Linf, L2"),
        ("torchattacks:EADL1(max_iterations=9)", "max_iterations of at least 10"),
        ("torchattacks:MultiAttack", "without attacks"),
    ],
)
def test_what_does_not_work_is_refused_with_a_reason(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        as_attack(text)


def test_norms_are_checked_before_work() -> None:
    with pytest.raises(AttackRefusedError, match="works for linf, not for l2"):
        as_attack("torchattacks:PGD").check(threat_model=ThreatModel(norm="l2", epsilon=1.0))


def test_errors_of_torchattacks_name_the_attack() -> None:
    module = network()
    x, y = batch(module)
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    with pytest.raises(AttackError, match=r"UPGD\(loss='no'\): torchattacks raised ValueError: no is not valid"):
        run(as_attack("torchattacks:UPGD(loss='no')"), module, x, y, threat_model)
    with pytest.raises(InvalidArgumentError, match="settings it accepts; torchattacks raised ValueError"):
        run(as_attack("torchattacks:AutoAttack(version='fast')"), module, x, y, threat_model)


def test_classes_of_others_are_attacked_row_by_row() -> None:
    class Brighter(torchattacks.attack.Attack):  # type: ignore[misc,name-defined]
        def __init__(self, model: nn.Module, eps: float = 0.1) -> None:
            super().__init__("Brighter", model)
            self.eps = eps
            self.supported_mode = ["default"]

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            return (images + self.eps).clamp(0, 1)

    attack = as_attack(Brighter(network(), eps=0.25))
    x, y = batch(network())
    assert attack.traits.batching == "single"
    candidates = run(attack, network(), x, y, ThreatModel(norm="linf", epsilon=0.25))
    assert torch.equal(candidates, (x + 0.25).clamp(0, 1))


def test_every_class_is_listed_once() -> None:
    listed = {listing.name: listing for listing in adapters()["torchattacks"].list_attacks()}
    assert sorted(listed) == sorted(torchattacks.__all__)
    assert [name for name, listing in listed.items() if listing.reason] == ["LGV"]


def test_other_objects_are_not_taken_for_attacks_and_models() -> None:
    adapter = adapters()["torchattacks"]
    assert adapter.adapt_attack(object()) is None
    assert adapter.adapt_model(network()) is None
    with pytest.raises(InvalidArgumentError, match="one of the attacks in torchattacks"):
        adapter.adapt_attack(torchattacks.attack.Attack)
