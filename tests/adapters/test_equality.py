"""On an ordinary classifier the wrapped attacks return what the libraries return, to the bit, and query as often."""

import functools
import inspect
import math
import re
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from robust_ext import ThreatModel, as_attack, as_module
from robust_ext.core.random import seeded_globals
from robust_ext.core.specification import parse_call
from robust_ext.core.target import Counted, PassCounter
from tests.adapters.common import (
    UNIT,
    Recorder,
    Stretched,
    art_classifier,
    conv_network,
    drawn_seed,
    network_in,
    predicted,
    run,
    uniform,
    usable,
)

SHAPE, CLASSES = (3, 8, 8), 10
EPSILON = {"linf": 0.2, "l2": 1.0, "l1": 5.0}
INF = math.inf


def read(table):
    """Norm, attack and settings of each call in a table that is ordered by norms."""
    cases = []
    for part in re.split(r"^\s*(?=l\w+:)", table, flags=re.MULTILINE)[1:]:
        norm, _, calls = part.partition(":")
        specs = [parse_call(f"x:{' '.join(call.split())}", argument="case") for call in calls.split(";")]
        cases += [(norm, spec.name, dict(spec.arguments)) for spec in specs]
    return cases


# Norm, attack and settings given to the adapter.
CASES = {
    "foolbox": read("""
        linf: LinfPGD(steps=5, rel_stepsize=0.1); LinfAdamPGD(steps=5); MIFGSM(steps=5); FGSM(random_start=True);
            LinfRepeatedAdditiveUniformNoiseAttack(repeats=3); LinfDeepFoolAttack(steps=10); LInfFMNAttack(steps=20);
            HopSkipJumpAttack(steps=2, max_gradient_eval_steps=20); PointwiseAttack(l2_binary_search=False);
            LinearSearchBlendedUniformNoiseAttack(steps=20)
        l2: L2PGD(steps=5); VirtualAdversarialAttack(steps=2, xi=0.01);
            L2ClippingAwareRepeatedAdditiveGaussianNoiseAttack(repeats=10); DDNAttack(steps=10);
            L2DeepFoolAttack(steps=10); NewtonFoolAttack(steps=20);
            L2CarliniWagnerAttack(steps=40, binary_search_steps=3, initial_const=10.0); BoundaryAttack(steps=20);
            HopSkipJumpAttack(steps=2, max_gradient_eval_steps=20); SaltAndPepperNoiseAttack(steps=50);
            InversionAttack; SpatialAttack(num_translations=2, num_rotations=3)
        l1: L1PGD(steps=5); SparseL1DescentAttack(steps=5); L0FMNAttack(steps=20);
            EADAttack(steps=40, binary_search_steps=3, initial_const=10.0); GaussianBlurAttack(steps=10)
    """),
    "art": read("""
        linf: FastGradientMethod(eps_step=0.1); BasicIterativeMethod(max_iter=4, eps_step=0.05);
            ProjectedGradientDescent(max_iter=4, eps_step=0.05, num_random_init=2);
            AutoProjectedGradientDescent(max_iter=4, eps_step=0.2, nb_random_init=1); SquareAttack(max_iter=10)
        l2: MomentumIterativeMethod(max_iter=4, eps_step=0.05);
            ProjectedGradientDescentNumpy(max_iter=4, eps_step=0.05);
            AutoConjugateGradient(max_iter=4, eps_step=0.2, nb_random_init=1);
            RescalingAutoConjugateGradient(max_iter=4, eps_step=0.2, nb_random_init=1); DeepFool(max_iter=10);
            CarliniL2Method(max_iter=5, binary_search_steps=2, initial_const=10.0);
            ElasticNet(max_iter=10, binary_search_steps=2, initial_const=1.0)
        l1: ProjectedGradientDescentPyTorch(max_iter=4, eps_step=0.05);
            CarliniL0Method(max_iter=3, binary_search_steps=2, initial_const=10.0)
    """),
    "torchattacks": read("""
        linf: FGSM; PGD(steps=4); BIM(steps=4); RFGSM(steps=4); EOTPGD(steps=3); FFGSM; TPGD(steps=4);
            MIFGSM(steps=4); UPGD(steps=4, loss='dlr', random_start=True); DIFGSM(steps=4); TIFGSM(steps=4);
            Jitter(steps=4); NIFGSM(steps=4); PGDRS(steps=3, noise_sd=0.25); SINIFGSM(steps=3); VMIFGSM(steps=3);
            VNIFGSM(steps=3); SPSA(nb_sample=8, nb_iter=2); PIFGSM(num_iter_set=3); PIFGSMPP(num_iter_set=3);
            APGD(steps=5, seed=7); APGDT(steps=5, seed=7); FAB(steps=5, seed=7, n_restarts=2);
            FAB(steps=3, seed=7, multi_targeted=True); AutoAttack(version='rand', seed=7)
        l2: APGD(steps=5, seed=7, loss='dlr'); Square(n_queries=20, seed=7); PGDL2(steps=4); PGDRSL2(steps=3);
            DeepFool(steps=10); GN(std=0.05); VANILA
        l1: JSMA; SparseFool(steps=3); OnePixel(steps=3); Pixle(restarts=2, max_iterations=5)
    """),
    "adv_lib": read("""
        linf: apgd(n_iter=10); apgd_targeted(n_iter=5); carlini_wagner_linf(max_iterations=5, initial_const=1.0);
            df(steps=10); fab(n_iter=5); fmn(steps=10); pdpgd(num_steps=10); perc_al(max_iterations=10);
            pgd_linf(steps=10); pgd_linf(steps=5, loss_function='dlr', restarts=2); tr(iter=20, adaptive=True)
        l2: alma(num_steps=20); apgd(n_iter=10, n_restarts=2); minimal_apgd(n_iter=5, binary_search_steps=3);
            carlini_wagner_l2(binary_search_steps=2, max_iterations=10, initial_const=1.0); ddn(steps=20);
            df(steps=10); fab(n_iter=5, restarts=2); fmn(steps=10); pdgd(num_steps=10, random_init=0.1);
            pdpgd(num_steps=10); sdf(steps=4, df_steps=5); tr(iter=20, eps=0.01);
            str_attack(max_iterations=20, initial_const=50.0, binary_search_steps=2, retrain=False)
        l1: alma(num_steps=20, init_lr_distance=0.5); apgd(n_iter=10, loss_function='ce');
            fab(n_iter=5); fga(max_iter=10, n_samples=3); fmn(steps=10); fmn(steps=10, norm=0);
            pdpgd(num_steps=10, norm=0, proximal_operator=23); sigma_zero(num_steps=20);
            vfga(max_iter=10, n_samples=3)
    """),
}
BOUNDS = {library: [UNIT, (-1.0, 1.0)] for library in CASES} | {"adv_lib": [UNIT, (-1.0, 1.0), (0.0, 255.0)]}


def attack_of(library, name):
    if not usable(library):
        pytest.skip(f"{library} is not installed")
    return import_module(f"robust_ext.adapters.{library}.attack").CATALOGUE.find(name)


def model_of(library, module, bounds, *, plain=False):
    """A model of the library, with preprocessing where it has any."""
    if library == "foolbox":
        foolbox = import_module("robust_ext.adapters.foolbox.library").foolbox
        preprocessing = {"mean": [0.3], "std": [0.7], "axis": -3}
        return foolbox.PyTorchModel(module, bounds=bounds, device="cpu", preprocessing=None if plain else preprocessing)
    if library == "art":
        preprocessing = (0.0, 1.0) if plain else (np.array([0.3]), np.array([0.7]))
        return art_classifier(module, SHAPE, CLASSES, clip_values=bounds, preprocessing=preprocessing)
    return module


def by_hand(library, made_of, model, x, y, settings, norm, epsilon):
    """What the library itself returns."""
    if library == "foolbox":
        attack = made_of(**settings)
        if getattr(attack, "_distance", 0) is None or made_of.__name__ == "PointwiseAttack":
            attack._distance = getattr(sys.modules["foolbox"].distances, norm)
        epsilons = None if isinstance(attack, sys.modules["foolbox"].attacks.base.MinimizationAttack) else epsilon
        with pytest.MonkeyPatch.context() as patched:
            # It warns once a process, whoever comes first.
            original = torch.meshgrid
            patched.setattr(torch, "meshgrid", lambda *a, **k: original(*a, **{"indexing": "ij", **k}))
            return attack(model, x.clone(), y, epsilons=epsilons)[1]
    if library == "art":
        return torch.from_numpy(made_of(model, **settings).generate(x.numpy(), y.numpy()))
    out = made_of(model, **settings)(x, y) if library == "torchattacks" else made_of(model, x, y, **settings)
    return out.detach()


def completed(library, made_of, settings, norm):
    """The settings with those that follow the threat model and the target."""
    epsilon = EPSILON[norm]
    if library == "foolbox":
        return {**settings, "constraint": norm} if made_of.__name__ == "HopSkipJumpAttack" else settings
    if library == "adv_lib":
        order = {"linf": INF, "l2": 2, "l1": 1}[norm]
        given = {"apgd": "eps", "apgd_targeted": "eps", "pgd_linf": "ε", "minimal_apgd": "max_eps"}
        wanted = {"norm": order, "p": order, "distance": norm, "num_classes": CLASSES, "targeted": False}
        wanted[given.get(made_of.__name__, "")] = epsilon
        accepted = inspect.signature(made_of).parameters
        return {key: value for key, value in wanted.items() if key in accepted} | settings
    names = {"art": {"linf": np.inf, "l2": 2, "l1": 1}, "torchattacks": {"linf": "Linf", "l2": "L2", "l1": "L1"}}
    wanted = {"eps": epsilon, "max_epsilon": epsilon, "norm": names[library][norm]}
    wanted |= {"verbose": False, "n_classes": CLASSES, **({"batch_size": 6} if library == "art" else {})}
    accepted = inspect.signature(made_of).parameters
    return {key: value for key, value in wanted.items() if key in accepted} | settings


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning")
@pytest.mark.parametrize(
    ("library", "case", "bounds"),
    [
        pytest.param(library, case, bounds, marks=[] if bounds == UNIT else pytest.mark.exhaustive)
        for library, found in CASES.items()
        for case in found
        for bounds in BOUNDS[library]
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) and isinstance(value[0], str) else str(value),
)
def test_candidates_are_the_librarys_own(library, case, bounds):
    norm, name, settings = case
    width = bounds[1] - bounds[0]
    made_of = attack_of(library, name)
    attack = as_attack((made_of, settings))
    model = model_of(library, network_in(bounds, SHAPE, CLASSES), bounds)
    module, x = as_module(model).module.eval(), uniform(6, SHAPE, bounds)
    y, before = predicted(module, x), x.clone()
    threat_model = ThreatModel(norm=norm, epsilon=EPSILON[norm] * width, bounds=bounds)
    attack.check(threat_model=threat_model)
    candidates = run(attack, module, x, y, threat_model, classes=CLASSES)
    assert torch.equal(x, before)
    assert (candidates.dtype, candidates.requires_grad) == (torch.float32, False)
    given = completed(library, made_of, settings, norm)
    in_unit = library in ("adv_lib", "torchattacks") or attack.entry.unit_space
    with seeded_globals(drawn_seed()):
        if bounds == UNIT or not in_unit:
            if bounds != UNIT and library == "art" and "eps" in given:
                given["eps"] = threat_model.epsilon
            expected = by_hand(library, made_of, model, x, y, given, norm, threat_model.epsilon)
        else:
            unit = ((x - bounds[0]) / width).clamp(0, 1)
            stretched = Stretched(module, bounds)
            stretched.place = nn.Parameter(torch.zeros(1))
            plain = model_of(library, stretched, UNIT, plain=True)
            out = by_hand(library, made_of, plain, unit, y, given, norm, EPSILON[norm])
            expected = torch.where(out == unit, x, (out * width + bounds[0]).clamp(*bounds))
    if attack.traits.failure == "start":
        failed = predicted(module, expected) == y
        assert not bool(failed.all())
        expected[failed] = x[failed]
    assert torch.equal(candidates, expected)
    # The descent in l0 takes more steps than a test should to find anything.
    assert torch.equal(candidates, x) == (name == "VANILA") or settings.get("norm") == 0
    if library == "adv_lib" and bounds == UNIT and settings.get("norm") != 0:
        assert bool((predicted(module, candidates) != y).any())
    if not attack.traits.minimum_norm and name not in ("GN", "VANILA"):
        assert bool(threat_model.contains(candidates, x).all())


FORMS = [("foolbox", "LinfPGD", {"steps": 4}), ("art", "ProjectedGradientDescent", {"max_iter": 4, "eps_step": 0.02})]
FORMS += [("torchattacks", "PGD", {"steps": 4, "alpha": 0.02}), ("adv_lib", "ddn", {"steps": 7})]


@pytest.mark.parametrize(("library", "name", "settings"), FORMS)
def test_texts_objects_classes_and_partials_are_one_attack_and_no_old_model_is_asked(library, name, settings):
    made_of, norm, other = (
        attack_of(library, name),
        "l2" if library == "adv_lib" else "linf",
        Recorder(network_in(UNIT, SHAPE)),
    )
    forms = [f"{library}:{name}({', '.join(f'{key}={value}' for key, value in settings.items())})", (made_of, settings)]
    if library == "adv_lib":
        inner = functools.partial(made_of, steps=3)
        forms += [functools.partial(made_of, **settings), (inner, settings), functools.partial(inner, **settings)]
    else:
        model = model_of(library, other.eval(), UNIT, plain=True)
        forms += [made_of(**settings) if library == "foolbox" else made_of(model, **settings)]
    module, x = network_in(UNIT, SHAPE, CLASSES), uniform(6, SHAPE)
    y, threat_model = predicted(module, x), ThreatModel(norm=norm, epsilon=EPSILON[norm])
    with seeded_globals(drawn_seed()):
        given = completed(library, made_of, settings, norm)
        expected = by_hand(
            library, made_of, model_of(library, module, UNIT, plain=True), x, y, given, norm, EPSILON[norm]
        )
    other.queries.clear()
    for form in forms:
        assert torch.equal(run(as_attack(form, name="mine"), module, x, y, threat_model, classes=CLASSES), expected)
    assert other.sizes == []
    assert as_attack(forms[0]).name == forms[0]
    assert len({as_attack(form).description for form in forms}) == 1
    assert as_attack(made_of, name="mine").name == "mine"


def test_the_cases_cover_every_attack():
    for library, left_out in {"adv_lib": set(), "torchattacks": {"CW", "EADEN", "EADL1", "MultiAttack"}}.items():
        named = {name for _, name, _ in CASES[library]} | left_out
        assert {listing.name for listing in usable(library)} <= named


class Top(nn.Module):
    """Class 0 is above all others by more than any step makes up for."""

    def forward(self, logits):
        return logits + 1e3 * nn.functional.one_hot(torch.zeros(len(logits), dtype=torch.int64), logits.shape[1])


@pytest.mark.parametrize(
    ("text", "norm", "forward", "backward"),
    [
        # One gradient a step, and one look at its success.
        ("foolbox:LinfPGD(steps=7)", "linf", 7 + 1, 7),
        ("foolbox:DDNAttack(steps=5)", "l2", 5 + 1, 5),
        # One gradient a step; then ART looks at the inputs and at the candidates once, to log how many succeeded.
        ("art:ProjectedGradientDescent(max_iter=7)", "linf", 7 + 2, 7),
        # A look and the gradients of all classes at the inputs, and again after each step.
        ("art:DeepFool(max_iter=4)", "l2", 2 * (1 + 4), 5 * (1 + 4)),
        # Of the inputs: what is still robust, its loss, and the loss of the stripes; then the same three a step.
        ("art:SquareAttack(max_iter=6)", "linf", 3 + 3 * 6, 0),
        ("torchattacks:FGSM", "linf", 1, 1),
        ("torchattacks:PGD(steps=7)", "linf", 7, 7),
        ("torchattacks:EOTPGD(steps=3, eot_iter=4)", "linf", 12, 12),
        # One pass there and back a step.
        ("adv_lib:ddn(steps=7)", "l2", 7, 7),
        ("adv_lib:sigma_zero(num_steps=9)", "l1", 9, 9),
        ("adv_lib:pgd_linf(steps=4)", "linf", 4, 4),
        # The start, then the steps.
        ("adv_lib:apgd(n_iter=5)", "linf", 6, 6),
        # The input, then two passes a step, and one back for each of the four other classes.
        ("adv_lib:fab(n_iter=3)", "l2", 1 + 2 * 3, 4 * 3),
        # Two looks a search step in two phases, each with one pass back.
        ("adv_lib:str_attack(binary_search_steps=2, max_iterations=3, retrain=False)", "l2", 12, 6),
    ],
)
def test_passes_are_those_counted_by_hand(text, norm, forward, backward):
    library, _, name = text.partition("(")[0].partition(":")
    attack_of(library, name)
    counter, network, x = PassCounter(), conv_network(SHAPE), uniform(6, SHAPE)
    y = predicted(network, x)
    if name == "DeepFool":
        # No step of a linear model of it arrives in four.
        network, y = nn.Sequential(network, Top()), torch.zeros(6, dtype=torch.int64)
    # So small that nothing is found, and every sample goes all the way.
    threat_model = ThreatModel(norm=norm, epsilon=1e-4)
    run(as_attack(text), Counted(network, counter).eval(), x, y, threat_model)
    assert counter == PassCounter(6 * forward, 6 * backward)
