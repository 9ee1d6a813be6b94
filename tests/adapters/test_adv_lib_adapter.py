from __future__ import annotations

import functools
import subprocess
import sys
import types
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robust_ext.attacks import Attack, CallableAttack
from robust_ext.attacks.base import draw_seed
from robust_ext.core.errors import AttackError, AttackRefusedError, InvalidArgumentError
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter, Target
from robust_ext.core.threat import ThreatModel
from robust_ext.registry import as_attack
from robust_ext.registry.base import adapters
from robust_ext.registry.model import as_module

# Found, not imported: adv-lib alone does not import where visdom is missing, which is what the adapter is for.
if find_spec("adv_lib") is None:
    pytest.skip("adv-lib is not installed", allow_module_level=True)
from robust_ext.adapters.adv_lib.catalogue import UNUSABLE
from robust_ext.adapters.adv_lib.entries import ENTRIES
from robust_ext.adapters.adv_lib.library import adv_lib

INF = float("inf")
EPSILON = 0.0625


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)).eval()


class Stretched(nn.Module):
    """The network as one of inputs in [0, 1]."""

    def __init__(self, low: float, width: float) -> None:
        super().__init__()
        self.inner, self.low, self.width = network(), low, width

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x * self.width + self.low)
        return out


def batch(bounds: tuple[float, float] = (0.0, 1.0)) -> tuple[Tensor, Tensor]:
    x = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * (bounds[1] - bounds[0]) + bounds[0]
    with torch.no_grad():
        return x, network()(x).argmax(1)


def run(
    attack: Attack, x: Tensor, y: Tensor, threat_model: ThreatModel, seed: int = 3, module: nn.Module | None = None
) -> Tensor:
    target = Target(
        module=module or network(),
        bounds=threat_model.bounds,
        classes=5,
        input_shape=tuple(x.shape[1:]),
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(seed)
    return attack.search(target, x, y, threat_model=threat_model, generator=generator)


def host(function: Any, settings: dict[str, Any], bounds: tuple[float, float], seed: int = 3) -> Tensor:
    """What adv-lib itself returns, by hand: the inputs stretched to [0, 1] and the result back."""
    x, y = batch(bounds)
    low, width = bounds[0], bounds[1] - bounds[0]
    with seeded_globals(draw_seed(torch.Generator().manual_seed(seed))):
        if bounds == (0.0, 1.0):
            plain: Tensor = function(network(), x.clone(), y, **settings)
            return plain
        unit = ((x - low) / width).clamp(0, 1)
        out = function(Stretched(low, width), unit.clone(), y, **settings)
    return torch.where(out == unit, x, (out * width + low).clamp(low, bounds[1]))


def function_of(name: str) -> Any:
    return (
        sys.modules["adv_lib.attacks.auto_pgd"].minimal_apgd
        if name == "minimal_apgd"
        else getattr(adv_lib.attacks, name)
    )


# Attack, norm, settings given to the adapter, and what adv-lib has to be called with on top for the same.
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("alma", "l2", {"num_steps": 20}, {"distance": "l2"}),
    ("alma", "l1", {"num_steps": 20, "init_lr_distance": 0.5}, {"distance": "l1"}),
    ("apgd", "linf", {"n_iter": 10}, {"eps": EPSILON, "norm": INF}),
    ("apgd", "l2", {"n_iter": 10, "n_restarts": 2}, {"eps": EPSILON, "norm": 2}),
    ("apgd", "l1", {"n_iter": 10, "loss_function": "ce"}, {"eps": EPSILON, "norm": 1}),
    ("apgd_targeted", "linf", {"n_iter": 5}, {"eps": EPSILON, "norm": INF}),
    ("minimal_apgd", "l2", {"n_iter": 5, "binary_search_steps": 3}, {"max_eps": EPSILON, "norm": 2}),
    ("carlini_wagner_l2", "l2", {"binary_search_steps": 2, "max_iterations": 10, "initial_const": 1.0}, {}),
    ("carlini_wagner_linf", "linf", {"max_iterations": 5, "initial_const": 1.0}, {}),
    ("ddn", "l2", {"steps": 20}, {}),
    ("df", "l2", {"steps": 10}, {"norm": 2}),
    ("df", "linf", {"steps": 10}, {"norm": INF}),
    ("fab", "linf", {"n_iter": 5}, {"norm": INF}),
    ("fab", "l2", {"n_iter": 5, "restarts": 2}, {"norm": 2}),
    ("fab", "l1", {"n_iter": 5}, {"norm": 1}),
    ("fga", "l1", {"max_iter": 10, "n_samples": 3}, {"targeted": False}),
    ("fmn", "linf", {"steps": 10}, {"norm": INF}),
    ("fmn", "l2", {"steps": 10}, {"norm": 2}),
    ("fmn", "l1", {"steps": 10}, {"norm": 1}),
    ("fmn", "l1", {"steps": 10, "norm": 0}, {}),
    ("pdgd", "l2", {"num_steps": 10, "random_init": 0.1}, {}),
    ("pdpgd", "linf", {"num_steps": 10}, {"norm": INF}),
    ("pdpgd", "l2", {"num_steps": 10}, {"norm": 2}),
    ("pdpgd", "l1", {"num_steps": 10, "norm": 0, "proximal_operator": 23}, {}),
    ("perc_al", "linf", {"max_iterations": 10}, {"num_classes": 5}),
    ("pgd_linf", "linf", {"steps": 10}, {"ε": EPSILON}),
    ("pgd_linf", "linf", {"steps": 5, "loss_function": "dlr", "restarts": 2}, {"ε": EPSILON}),
    ("sdf", "l2", {"steps": 4, "df_steps": 5}, {}),
    ("sigma_zero", "l1", {"num_steps": 20}, {}),
    ("str_attack", "l2", {"binary_search_steps": 2, "max_iterations": 20, "initial_const": 50.0, "retrain": False}, {}),
    ("tr", "l2", {"iter": 20, "eps": 0.01}, {"p": 2}),
    ("tr", "linf", {"iter": 20, "adaptive": True}, {"p": INF}),
    ("vfga", "l1", {"max_iter": 10, "n_samples": 3}, {"targeted": False}),
]
# These need more steps than a test should take to find anything.
TOO_SHORT = [case for case in CASES if case[0] == "pdpgd" and case[2].get("norm") == 0]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 1.0), (0.0, 255.0)])
@pytest.mark.parametrize(("name", "norm", "settings", "filled"), CASES)
def test_every_attack_equals_adv_lib(
    bounds: tuple[float, float], name: str, norm: str, settings: dict[str, Any], filled: dict[str, Any]
) -> None:
    x, y = batch(bounds)
    before = x.clone()
    threat_model = ThreatModel(norm=norm, epsilon=EPSILON * (bounds[1] - bounds[0]), bounds=bounds)
    function = function_of(name)
    attack = as_attack((function, settings))
    attack.check(threat_model=threat_model)
    candidates = run(attack, x, y, threat_model)
    assert torch.equal(candidates, host(function, {**settings, **filled}, bounds))
    assert torch.equal(x, before)
    assert not candidates.requires_grad
    assert float(candidates.min()) >= bounds[0]
    assert float(candidates.max()) <= bounds[1]
    if not attack.traits.minimum_norm:
        assert bool(threat_model.contains(candidates, x).all())


def test_the_cases_cover_every_attack() -> None:
    assert {name for name, *_ in CASES} == set(ENTRIES)


@pytest.mark.parametrize(("name", "norm", "settings", "filled"), [case for case in CASES if case not in TOO_SHORT])
def test_the_cases_find_something(name: str, norm: str, settings: dict[str, Any], filled: dict[str, Any]) -> None:
    x, y = batch()
    scale = {"linf": 1.0, "l2": 16.0, "l1": 64.0}[norm]
    candidates = run(as_attack((function_of(name), settings)), x, y, ThreatModel(norm=norm, epsilon=EPSILON * scale))
    with torch.no_grad():
        assert bool((network()(candidates).argmax(1) != y).any())


def test_strings_functions_partials_and_tuples_are_equivalent() -> None:
    x, y = batch()
    threat_model = ThreatModel(norm="l2", epsilon=0.5)
    ddn = adv_lib.attacks.ddn
    expected = host(ddn, {"steps": 7}, (0.0, 1.0))
    forms: list[object] = [
        "adv_lib:ddn(steps=7)",
        functools.partial(ddn, steps=7),
        (ddn, {"steps": 7}),
        (functools.partial(ddn, steps=3), {"steps": 7}),
        functools.partial(functools.partial(ddn, steps=3), steps=7),
    ]
    for form in forms:
        attack = as_attack(form)
        assert torch.equal(run(attack, x, y, threat_model), expected)
        assert attack.description == "adv-lib ddn(steps=7)"
    assert torch.equal(run(as_attack(ddn), x, y, threat_model), host(ddn, {}, (0.0, 1.0)))
    assert (as_attack(ddn).name, as_attack(ddn, name="mine").name) == ("ddn", "mine")
    assert as_attack("adv_lib:ddn(steps=7)").name == "adv_lib:ddn(steps=7)"


def test_greek_settings_norms_and_penalties_can_be_written() -> None:
    x, y = batch()
    linf, l2 = (ThreatModel(norm=norm, epsilon=EPSILON) for norm in ("linf", "l2"))
    attack = as_attack("adv_lib:alma(τ=0.5, num_steps=30)")
    by_hand = host(adv_lib.attacks.alma, {"τ": 0.5, "num_steps": 30}, (0.0, 1.0))
    assert torch.equal(run(attack, x, y, l2), by_hand)
    attack = as_attack("adv_lib:fmn(norm='linf')")
    assert attack.traits.norms == ("linf",)
    assert torch.equal(run(attack, x, y, linf), host(adv_lib.attacks.fmn, {"norm": INF}, (0.0, 1.0)))
    penalty = adv_lib.utils.lagrangian_penalties.all_penalties["P3"]
    attack = as_attack("adv_lib:alma(penalty='P3', num_steps=5)")
    by_hand = host(adv_lib.attacks.alma, {"penalty": penalty, "num_steps": 5}, (0.0, 1.0))
    assert torch.equal(run(attack, x, y, l2), by_hand)
    assert " at 0x" not in attack.description


def test_functions_of_others_that_only_wrap_one_stay_plain_callables() -> None:
    @functools.wraps(adv_lib.attacks.ddn)
    def mine(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return x

    assert mine.__module__.startswith("adv_lib")
    assert isinstance(as_attack(mine), CallableAttack)


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_runs_depend_on_the_generator_only(name: str) -> None:
    x, y = batch()
    entry = ENTRIES[name]
    attack = as_attack((function_of(name), dict(entry.trial)))
    threat_model = ThreatModel(norm=entry.traits.norms[0], epsilon=0.02)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    first = run(attack, x, y, threat_model)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    assert torch.equal(run(attack, x, y, threat_model), first)


@pytest.mark.parametrize("name", ["apgd", "pgd_linf", "fga", "vfga"])
def test_other_seeds_give_other_candidates(name: str) -> None:
    x, y = batch()
    attack = as_attack((function_of(name), dict(ENTRIES[name].trial)))
    threat_model = ThreatModel(norm=attack.traits.norms[0], epsilon=0.25)
    runs = [run(attack, x, y, threat_model, seed=seed) for seed in (3, 4)]
    assert not torch.equal(*runs)


@pytest.mark.parametrize(
    ("text", "norm", "forward", "backward"),
    [
        # One pass there and back a step.
        ("adv_lib:ddn(steps=7)", "l2", 6 * 7, 6 * 7),
        ("adv_lib:sigma_zero(num_steps=9)", "l1", 6 * 9, 6 * 9),
        ("adv_lib:pgd_linf(steps=4)", "linf", 6 * 4, 6 * 4),
        # The start, then the steps.
        ("adv_lib:apgd(n_iter=5)", "linf", 6 * 6, 6 * 6),
        # The input, then two passes a step, and one back for each of the four other classes.
        ("adv_lib:fab(n_iter=3)", "l2", 6 * (1 + 2 * 3), 6 * 4 * 3),
        # Two looks a search step in two phases, each with one pass back.
        ("adv_lib:str_attack(binary_search_steps=2, max_iterations=3, retrain=False)", "l2", 6 * 12, 6 * 6),
    ],
)
def test_passes_are_those_counted_by_hand(text: str, norm: str, forward: int, backward: int) -> None:
    x, y = batch()
    counter = PassCounter()
    run(as_attack(text), x, y, ThreatModel(norm=norm, epsilon=1e-3), module=Counted(network(), counter))
    assert (counter.forward, counter.backward) == (forward, backward)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adv_lib:dnn", r"did you mean ddn"),
        ("adv_lib:utils", "robust-ext attacks lists them"),
        ("adv_lib:ddn(step=3)", r"one of: targeted, steps, .*did you mean steps\?"),
        ("adv_lib:ddn(callback=None)", "one of: "),
        ("adv_lib:fmn(starting_points=None)", "one of: "),
        ("adv_lib:perc_al(momentum=1)", r"one of: targeted, max_iterations, "),
        ("adv_lib:df(return_targets=True)", "one of: "),
        ("adv_lib:apgd(targeted=True)", "true labels"),
        ("adv_lib:apgd(eps='much')", "eps: got"),
        ("adv_lib:df(norm='l1')", "norm=1, expected one of inf, 2"),
        ("adv_lib:fmn(norm=[2])", r"norm=\[2\], expected one of inf, 2, 1, 0"),
        ("adv_lib:alma(distance='lpips')", "downloads a network"),
        ("adv_lib:alma(penalty='P99')", "one of: PHRQuad"),
        ("adv_lib:segmentation.dag", "segmentation, where every pixel has a label; use df"),
    ],
)
def test_what_cannot_be_built_is_explained(text: str, expected: str) -> None:
    with pytest.raises(InvalidArgumentError, match=expected):
        as_attack(text)


def test_other_functions_and_forms_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="one of: alma"):
        as_attack(adv_lib.utils.losses.difference_of_logits)
    with pytest.raises(InvalidArgumentError, match="keyword arguments"):
        as_attack(functools.partial(adv_lib.attacks.ddn, network()))
    with pytest.raises(InvalidArgumentError, match="one of: targeted"):
        as_attack(functools.partial(adv_lib.attacks.ddn, model=network()))
    with pytest.raises(InvalidArgumentError, match="a dict of keyword arguments"):
        as_attack((adv_lib.attacks.ddn, 3))


def test_norms_and_budgets_that_were_set_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AttackRefusedError, match="works for l2"):
        as_attack("adv_lib:fab(norm=2)").check(threat_model=ThreatModel(norm="linf", epsilon=0.1))
    x, y = batch()
    run(as_attack("adv_lib:pgd_linf(ε=0.25, steps=1)"), x, y, ThreatModel(norm="linf", epsilon=0.125))
    assert "ε=0.25 was set and differs" in caplog.text
    caplog.clear()
    run(as_attack("adv_lib:pgd_linf(ε=0.25, steps=1)"), x, y, ThreatModel(norm="linf", epsilon=0.25))
    assert not caplog.text


def test_failures_inside_name_the_attack() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no answer")

    x, y = batch()
    with pytest.raises(AttackError, match="adv_lib:ddn: adv-lib raised RuntimeError: no answer"):
        run(as_attack("adv_lib:ddn"), x, y, ThreatModel(norm="l2", epsilon=0.1), module=Broken())


def test_the_listing_holds_every_function_of_the_library() -> None:
    listed = {entry.name: entry for entry in adapters()["adv_lib"].list_attacks()}
    exported = {name for name, member in vars(adv_lib.attacks).items() if isinstance(member, types.FunctionType)}
    assert exported <= set(listed)
    assert {name for name, entry in listed.items() if entry.reason} == set(UNUSABLE)
    for name, entry in listed.items():
        if not entry.reason:
            assert adapters()["adv_lib"].build_attack(name, entry.trial, name="x").traits == entry.traits
    assert [name for name, entry in listed.items() if entry.channels == 3] == ["perc_al"]


def test_modules_of_adv_lib_are_plain_modules() -> None:
    module = adv_lib.utils.normalize_model(network(), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    assert as_module(module).module is module
    normalizer = adv_lib.utils.ImageNormalizer((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    assert as_module(normalizer).module is normalizer


def test_importing_the_adapter_imports_no_adv_lib_and_using_it_leaves_no_stand_ins() -> None:
    code = (
        "import sys, importlib.util\n"
        "from robust_ext.registry import as_attack\n"
        "as_attack(lambda model, x, y: x); assert 'adv_lib' not in sys.modules\n"
        "missing = {n for n in ('visdom', 'torchvision', 'distutils') if importlib.util.find_spec(n) is None}\n"
        "as_attack('adv_lib:ddn'); assert 'adv_lib' in sys.modules\n"
        "assert not {m for m in sys.modules if m.split('.')[0] in missing}\n"
        "assert not {m for m in sys.modules if m.startswith('adv_lib.attacks.segmentation')}\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_python_without_distutils_imports_adv_lib_too() -> None:
    code = (
        "import sys, importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, p=None: None if n == 'distutils' else find(n, p)\n"
        "import torch\n"
        "for name in [n for n in sys.modules if n.split('.')[0] == 'distutils']: del sys.modules[name]\n"
        "from robust_ext.adapters.adv_lib.library import adv_lib\n"
        "assert sys.modules['adv_lib.utils.projections'].use_tensors_in_clamp\n"
        "assert not [n for n in sys.modules if n.split('.')[0] == 'distutils']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
