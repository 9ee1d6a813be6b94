"""On an ordinary classifier the wrapped attacks return what the libraries return, to the bit, and query as often.

Every attack of every library is listed, and used or refused with a reason; what cannot be built is explained.
"""

import inspect
import math
import sys
import types
from importlib import import_module

import numpy as np
import pytest
import torch

from robust_ext import InvalidArgumentError, ThreatModel, as_attack, as_module
from robust_ext.adapters.catalogue import check_ranges
from robust_ext.core.errors import RobustExtWarning
from robust_ext.core.random import seeded_globals
from robust_ext.core.target import Counted, PassCounter
from robust_ext.registry.base import adapters
from tests.adapters import common
from tests.adapters.common import LIBRARIES, UNIT, catalogue, predicted, require, run, uniform, usable

SHAPE, CLASSES, INF = (3, 8, 8), 10, math.inf
EPSILON = {"linf": 0.2, "l2": 1.0, "l1": 5.0}
NETWORK, X = common.conv_network(SHAPE), uniform(4, SHAPE)
Y = predicted(NETWORK, X)
EVERY = [case for library in LIBRARIES for case in common.cases(usable(library), library)]


# Attacks that the adapter mends, that need more than inputs, or whose optimizer would be compiled.
OTHER = {
    "foolbox": "BinarizationRefinementAttack GenAttack",
    "torchattacks": "MultiAttack CW EADEN EADL1",
    "adv_lib": "",
    "art": "AutoAttack FeatureAdversariesPyTorch NewtonFool SaliencyMapMethod VirtualAdversarialMethod Wasserstein",
}
# Settings in place of those of the trial, and others that change what is done.
FEW = {"max_iter": 3, "binary_search_steps": 2, "initial_const": 10.0}
SETTINGS = {("art", "CarliniL0Method"): FEW, ("art", "CarliniL2Method"): FEW, ("art", "CarliniLInfMethod"): FEW}
MORE = [
    ("foolbox", "linf", "PointwiseAttack", {"l2_binary_search": False}),
    ("art", "linf", "ProjectedGradientDescent", {"max_iter": 4, "eps_step": 0.05, "num_random_init": 2}),
    ("torchattacks", "linf", "UPGD", {"steps": 4, "loss": "dlr", "random_start": True}),
    ("torchattacks", "linf", "FAB", {"steps": 3, "seed": 7, "multi_targeted": True}),
    ("adv_lib", "linf", "pgd_linf", {"steps": 5, "loss_function": "dlr", "restarts": 2}),
    ("adv_lib", "l2", "pdgd", {"num_steps": 10, "random_init": 0.1}),
    ("adv_lib", "l1", "fmn", {"steps": 10, "norm": 0}),
]


def settings_of(library, listing):
    """Settings of the trial, and those that adapters fill in otherwise than libraries do."""
    found = dict(SETTINGS.get((library, listing.name), listing.trial))
    known = inspect.signature(catalogue(library).find(listing.name)).parameters
    fixed = {"eps_step": 0.05} if library == "art" else {"seed": 7} if library == "torchattacks" else {}
    return {**{key: value for key, value in fixed.items() if key in known}, **found}


def alike():
    """Library, norm, name and settings of what returns the library's own."""
    for library in LIBRARIES:
        for listing in usable(library):
            rows = library != "art" or listing.traits.batching != "single"
            if rows and listing.name not in OTHER[library].split() and "BrendelBethge" not in listing.name:
                settings = settings_of(library, listing)
                yield from ((library, norm, listing.name, settings) for norm in listing.traits.norms)
    yield from MORE


def model_of(library, module, *, plain=False):
    """A model of the library, with preprocessing where it has any."""
    if library == "foolbox":
        foolbox = import_module("robust_ext.adapters.foolbox.library").foolbox
        preprocessing = None if plain else {"mean": [0.3], "std": [0.7], "axis": -3}
        return foolbox.PyTorchModel(module, bounds=UNIT, device="cpu", preprocessing=preprocessing)
    if library == "art":
        preprocessing = (0.0, 1.0) if plain else (np.array([0.3]), np.array([0.7]))
        return common.art_classifier(module, SHAPE, CLASSES, preprocessing=preprocessing)
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
    if library == "foolbox":
        return {**settings, "constraint": norm} if made_of.__name__ == "HopSkipJumpAttack" else settings
    order = norm.capitalize() if library == "torchattacks" else {"linf": INF, "l2": 2, "l1": 1}[norm]
    wanted = {"norm": order, "p": order, "distance": norm, "num_classes": CLASSES, "n_classes": CLASSES}
    wanted |= {"targeted": False, "verbose": False} | ({"batch_size": 6} if library == "art" else {})
    # An eps of adv-lib's may be a step.
    budget = made_of.__name__ in ("apgd", "apgd_targeted") or library != "adv_lib"
    wanted |= dict.fromkeys(("ε", "max_eps", "max_epsilon", *("eps",) * budget), EPSILON[norm])
    accepted = inspect.signature(made_of).parameters
    return {key: value for key, value in wanted.items() if key in accepted} | settings


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't:DeprecationWarning")
@pytest.mark.parametrize(("library", "norm", "name", "settings"), list(alike()), ids=str)
def test_candidates_are_the_librarys_own(library, norm, name, settings):
    made_of = catalogue(library).find(name)
    attack = as_attack((made_of, settings))
    model = model_of(library, common.conv_network(SHAPE, CLASSES))
    module, x = as_module(model).module.eval(), uniform(6, SHAPE)
    y, before, threat_model = predicted(module, x), x.clone(), ThreatModel(norm=norm, epsilon=EPSILON[norm])
    candidates = run(attack, module, x, y, threat_model, classes=CLASSES)
    assert torch.equal(x, before)
    given = completed(library, made_of, settings, norm)
    with seeded_globals(common.drawn_seed()):
        expected = by_hand(library, made_of, model, x, y, given, norm, EPSILON[norm])
    if attack.traits.failure in ("start", "zeros"):
        # Zeros are a failure even where they are another class.
        zeros = (expected == 0).flatten(1).all(1) & (attack.traits.failure == "zeros")
        failed = (predicted(module, expected) == y) | zeros
        assert not bool(failed.all())
        expected[failed] = x[failed]
    assert torch.equal(candidates, expected)
    # The descent in l0 takes more steps than a test should to find anything.
    assert torch.equal(candidates, x) == (name == "VANILA") or settings.get("norm") == 0
    if not attack.traits.minimum_norm and name not in ("GN", "VANILA"):
        assert bool(threat_model.contains(candidates, x).all())


@pytest.mark.parametrize(
    ("text", "norm", "forward", "backward"),
    [
        # One gradient a step, and one look at its success.
        ("foolbox:LinfPGD(steps=7)", "linf", 7 + 1, 7),
        # One gradient a step; then ART looks at the inputs and at the candidates once, to log how many succeeded.
        ("art:ProjectedGradientDescent(max_iter=7)", "linf", 7 + 2, 7),
        # Of the inputs: what is still robust, its loss, and the loss of the stripes; then the same three a step.
        ("art:SquareAttack(max_iter=6)", "linf", 3 + 3 * 6, 0),
        ("torchattacks:PGD(steps=7)", "linf", 7, 7),
        ("torchattacks:EOTPGD(steps=3, eot_iter=4)", "linf", 12, 12),
        # One pass there and back a step.
        ("adv_lib:ddn(steps=7)", "l2", 7, 7),
        # The input, then two passes a step, and one back for each of the four other classes.
        ("adv_lib:fab(n_iter=3)", "l2", 1 + 2 * 3, 4 * 3),
    ],
)
def test_passes_are_those_counted_by_hand(text, norm, forward, backward):
    require(text.partition(":")[0])
    counter, x = PassCounter(), uniform(6, SHAPE)
    # So small that nothing is found, and every sample goes all the way.
    threat_model = ThreatModel(norm=norm, epsilon=1e-4)
    run(as_attack(text), Counted(NETWORK, counter).eval(), x, predicted(NETWORK, x), threat_model)
    assert counter == PassCounter(6 * forward, 6 * backward)


def public(library):
    """The names of a library's attacks, read off the library."""
    package = require(library)
    if library == "adv_lib":
        members = vars(package.attacks).items()
        return {name for name, member in members if isinstance(member, types.FunctionType)} | {"minimal_apgd"}
    if library == "torchattacks":
        return set(package.__all__)
    module = package.attacks.evasion if library == "art" else package.attacks
    base = package.attacks.EvasionAttack if library == "art" else package.attacks.Attack
    members = inspect.getmembers(module, inspect.isclass)
    names = {name for name, member in members if issubclass(member, base) and member.__name__ == name}
    return names - {"Attack"}


@pytest.mark.parametrize(("library", "count"), [("adv_lib", 20), ("art", 42), ("foolbox", 57), ("torchattacks", 36)])
def test_every_attack_is_listed_once_and_used_or_refused_with_a_reason(library, count):
    names = public(library)
    listed = {listing.name: listing for listing in adapters()[library].list_attacks()}
    entries, unusable = catalogue(library).entries, catalogue(library).unusable
    assert set(listed) == names | {name for name in listed if name.startswith("segmentation.")}
    assert set(entries) | set(unusable) >= names
    assert not set(entries) & set(unusable)
    refused = set(unusable) | {name for name, entry in entries.items() if entry.reason}
    assert {name for name, listing in listed.items() if listing.reason} == refused & set(listed)
    assert all("use " in listing.reason for listing in listed.values() if listing.reason)
    assert len(usable(library)) >= count
    aliases = {alias for listing in listed.values() for alias in listing.aliases}
    assert library != "foolbox" or {"PGD", "LinfPGD", "FGSM", "FGM", "MIFGSM"} <= aliases
    colours = {"adv_lib": {"perc_al"}, "art": {"LaserAttack"}}.get(library, set())
    assert {name for name, listing in listed.items() if listing.channels == 3} == colours


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foolbox:LinfPGD(step=3)", r"did you mean steps\?"),
        ("foolbox:VirtualAdversarialAttack", r"VirtualAdversarialAttack\(steps=\.\.\., \.\.\.\)"),
        ("foolbox:HopSkipJumpAttack(constraint='l7')", "Foolbox raised AssertionError"),
        ("art:ProjectedGradientDescent(targeted=True)", "targeted=False"),
        ("art:HopSkipJump(norm=1)", "a norm among linf, l2"),
        ("torchattacks:MultiAttack(attacks=['PGD', 'PGDL2'])", "norm in common"),
        ("torchattacks:MultiAttack(attacks=['PGD(steps=-1)'])", "steps=-1"),
        ("torchattacks:MultiAttack(attacks=['os:system(command=1)'])", "names of torchattacks' attacks"),
        ("adv_lib:df(norm='l1')", "norm=1, expected one of inf, 2"),
        ("adv_lib:alma(distance='lpips')", "downloads a network"),
        ("adv_lib:segmentation.dag", "use df"),
    ],
)
def test_what_cannot_be_built_is_explained(text, message):
    require(text.partition(":")[0])
    with pytest.raises(InvalidArgumentError, match=message):
        as_attack(text)


@pytest.mark.parametrize(
    ("text", "other", "logged"),
    [
        ("art:FastGradientMethod(eps=0.05, norm='inf')", 0.05, ["eps"]),
        ("torchattacks:APGD(eps=0.25, norm='L2', steps=2)", 0.25, ["eps", "norm"]),
        ("adv_lib:pgd_linf(ε=0.25, steps=1)", 0.25, ["ε"]),
    ],
)
def test_settings_that_differ_from_the_threat_model_are_kept_and_warned_of(text, other, logged, recwarn):
    require(text.partition(":")[0])
    for epsilon, names in ((0.1, logged), (other, [name for name in logged if name == "norm"])):
        recwarn.clear()
        candidates = run(as_attack(text), NETWORK, X, Y, ThreatModel(norm="linf", epsilon=epsilon))
        warned = [str(one.message).split(": ")[-1] for one in recwarn if one.category is RobustExtWarning]
        assert [words.split("=")[0] for words in warned] == names
        assert all("was set and differs from the threat model's" in words for words in warned)
        if text.startswith("art"):
            assert float((candidates - X).abs().max()) == pytest.approx(other, rel=1e-4)


def test_attacks_of_others_go_one_sample_at_a_time():
    foolbox, evasion, torchattacks = require("foolbox"), require("art").attacks.evasion, require("torchattacks")

    class MineOfFoolbox(foolbox.attacks.LinfFastGradientAttack):
        pass

    class MineOfArt(evasion.FastGradientMethod):
        pass

    class Brighter(torchattacks.attack.Attack):
        def __init__(self, model, eps=0.1):
            super().__init__("Brighter", model)
            self.eps, self.supported_mode = eps, ["default"]

        def forward(self, images, labels):
            return (images + self.eps).clamp(0, 1)

    assert as_attack(MineOfFoolbox()).traits.norms == ("linf",)
    stepped = evasion.FastGradientMethod(common.art_classifier(NETWORK, SHAPE), eps=0.25).generate(X.numpy(), Y.numpy())
    for one, expected in (
        (MineOfFoolbox(random_start=False), torch.from_numpy(stepped)),
        (MineOfArt, torch.from_numpy(stepped)),
        (Brighter(NETWORK, eps=0.25), (X + 0.25).clamp(0, 1)),
    ):
        attack = as_attack(one)
        assert attack.traits.batching == "single"
        torch.testing.assert_close(run(attack, NETWORK, X, Y, ThreatModel(norm="linf", epsilon=0.25)), expected)


# Arguments by name, and values that make no sense for them.
COUNTS = "steps max_iter num_steps n_iter max_iterations n_queries repeats batch_size n_restarts"
NONSENSE = {
    COUNTS: (-5, 0, 0.5, True, "many", 10**10),
    "rel_stepsize abs_stepsize stepsize eps_step alpha lr learning_rate eps": (-0.1, 0, INF, math.nan, "big", True),
    "norm p layer target max_mask_size": (),
}


@pytest.mark.parametrize(("library", "listing"), EVERY)
def test_defaults_pass_and_nonsense_is_refused(library, listing):
    found = catalogue(library).find(listing.name)
    check_ranges(found, listing.trial)
    for name, parameter in inspect.signature(found).parameters.items():
        default = parameter.default
        if isinstance(default, (bool, int, float, str)):
            check_ranges(found, {name: default})
        wrong = (math.nan, "much") if isinstance(default, (int, float)) and math.isfinite(default) else ()
        wrong = next((values for names, values in NONSENSE.items() if name in names.split()), wrong)
        for value in ("no", 2, 0.5) if isinstance(default, bool) else wrong:
            with pytest.raises(InvalidArgumentError, match=name):
                check_ranges(found, {name: value})
