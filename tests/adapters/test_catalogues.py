"""Every attack of every library is listed, and used or refused with a reason; what cannot be built is explained."""

import inspect
import types
from importlib import import_module

import pytest
import torch

from robust_ext import InvalidArgumentError, ThreatModel, as_attack
from robust_ext.core.errors import RobustExtWarning
from robust_ext.registry.base import adapters
from tests.adapters.common import LIBRARIES, cases, conv_network, predicted, run, uniform, usable

EVERY = [case for library in LIBRARIES for case in cases(usable(library), library)]


NETWORK = conv_network((3, 8, 8))
X = uniform(4, (3, 8, 8))
Y = predicted(NETWORK, X)


def host(library):
    """The library itself, where it is installed."""
    if not usable(library):
        pytest.skip(f"{library} is not installed")
    return import_module(f"robust_ext.adapters.{library}.attack").__dict__[library]


def classes_of(module, base):
    members = inspect.getmembers(module, inspect.isclass)
    return {name for name, member in members if issubclass(member, base) and member.__name__ == name}


def public(library):
    """The names of a library's attacks, read off the library."""
    package = host(library)
    if library == "adv_lib":
        members = vars(package.attacks).items()
        return {name for name, member in members if isinstance(member, types.FunctionType)} | {"minimal_apgd"}
    if library == "art":
        return classes_of(package.attacks.evasion, package.attacks.EvasionAttack)
    if library == "foolbox":
        return classes_of(package.attacks, package.attacks.Attack) - {"Attack"}
    return set(package.__all__)


@pytest.mark.parametrize(("library", "count"), [("adv_lib", 20), ("art", 42), ("foolbox", 57), ("torchattacks", 36)])
def test_every_attack_is_listed_once_and_used_or_refused_with_a_reason(library, count):
    names = public(library)
    listed = {listing.name: listing for listing in adapters()[library].list_attacks()}
    unusable = import_module(f"robust_ext.adapters.{library}.attack").UNUSABLE
    entries = import_module(f"robust_ext.adapters.{library}.entries").ENTRIES
    elsewhere = {name for name in listed if name.startswith("segmentation.")}
    assert set(listed) == names | elsewhere
    assert set(entries) | set(unusable) >= names
    assert not set(entries) & set(unusable)
    elsewhere_only = {name for name, entry in entries.items() if entry.reason}
    assert {name for name, listing in listed.items() if listing.reason} == (set(unusable) | elsewhere_only) & set(
        listed
    )
    assert all("use " in listing.reason for listing in listed.values() if listing.reason)
    assert len(usable(library)) >= count
    if library == "foolbox":
        aliases = {alias for listing in listed.values() for alias in listing.aliases}
        assert {"PGD", "LinfPGD", "FGSM", "FGM", "MIFGSM"} <= aliases
    colours = {"adv_lib": {"perc_al"}, "art": {"LaserAttack"}}.get(library, set())
    assert {name for name, listing in listed.items() if listing.channels == 3} == colours


@pytest.mark.parametrize(("library", "listing"), EVERY)
def test_what_is_built_has_the_listed_traits(library, listing, monkeypatch):
    if library == "foolbox" and listing.traits.packages:
        monkeypatch.setattr(getattr(host(library).attacks, listing.name), "instantiate_optimizer", lambda self: None)
    # What a version of AutoAttack runs, and what a MultiAttack holds, decides on its traits.
    settings = {} if listing.name == "AutoAttack" else listing.trial
    built = adapters()[library].build_attack(listing.name, settings, name="x")
    assert built.traits == listing.traits or listing.name == "MultiAttack"
    assert "at 0x" not in built.description
    if library == "foolbox":
        cls = getattr(host(library).attacks, listing.name)
        assert listing.traits.minimum_norm != issubclass(cls, host(library).attacks.base.FixedEpsilonAttack)
        distance = getattr(built.attack, "distance", None) if "Flexible" not in str(cls.__mro__) else None
        if distance is not None and listing.name != "HopSkipJumpAttack":
            assert listing.traits.norms == ({0: "l1", 1: "l1", 2: "l2"}.get(distance.p, "linf"),)
        assert listing.traits.batching == "full"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("foolbox:LinfPDG", "did you mean LinfPGD"),
        ("foolbox:LinfPGD(step=3)", r"did you mean steps\?"),
        ("foolbox:LinfPGD(steps=-5)", r"Attack\(steps=-5\), expected an integer of at least 1"),
        ("foolbox:VirtualAdversarialAttack", r"VirtualAdversarialAttack\(steps=\.\.\., \.\.\.\)"),
        ("foolbox:HopSkipJumpAttack(constraint='l7')", "Foolbox raised AssertionError"),
        ("foolbox:DatasetAttack", "other samples that it was fed"),
        ("art:ProjectedGradientDescent(estimator=3)", "one of: norm, eps,"),
        ("art:ProjectedGradientDescent(targeted=True)", "targeted=False"),
        ("art:ProjectedGradientDescent(max_iter=0)", "max_iter=0"),
        ("art:HopSkipJump(norm=1)", "a norm among linf, l2"),
        ("torchattacks:wrappers", "robust-ext attacks lists them"),
        ("torchattacks:FAB(norm='L1')", "a norm among Linf, L2"),
        ("torchattacks:MultiAttack(attacks=['PGD', 'PGDL2'])", "norm in common"),
        ("torchattacks:MultiAttack(attacks=['PGD(steps=-1)'])", "steps=-1"),
        ("torchattacks:MultiAttack(attacks=['os:system(command=1)'])", "names of torchattacks' attacks"),
        ("adv_lib:fmn(starting_points=None)", "one of: "),
        ("adv_lib:apgd(targeted=True)", r"criterion=robust_ext.Targeted\(\)"),
        ("adv_lib:apgd(eps='much')", "expected a finite number"),
        ("adv_lib:df(norm='l1')", "norm=1, expected one of inf, 2"),
        ("adv_lib:alma(distance='lpips')", "downloads a network"),
        ("adv_lib:segmentation.dag", "use df"),
    ],
)
def test_what_cannot_be_built_is_explained(text, message):
    host(text.partition(":")[0])
    with pytest.raises(InvalidArgumentError, match=message):
        as_attack(text)


@pytest.mark.parametrize(
    ("text", "other", "logged"),
    [
        ("art:FastGradientMethod(eps=0.05, norm='inf')", 0.05, ["eps"]),
        ("torchattacks:PGD(eps=8/255, steps=1)", 8 / 255, ["eps"]),
        ("torchattacks:APGD(eps=0.25, norm='L2', steps=2)", 0.25, ["eps", "norm"]),
        ("adv_lib:pgd_linf(ε=0.25, steps=1)", 0.25, ["ε"]),
    ],
)
def test_settings_that_differ_from_the_threat_model_are_kept_and_warned_of(text, other, logged, recwarn):
    host(text.partition(":")[0])
    for epsilon, names in ((0.1, logged), (other, [name for name in logged if name == "norm"])):
        recwarn.clear()
        candidates = run(as_attack(text), NETWORK, X, Y, ThreatModel(norm="linf", epsilon=epsilon))
        warned = [str(one.message).split(": ")[-1] for one in recwarn if one.category is RobustExtWarning]
        assert [words.split("=")[0] for words in warned] == names
        assert all("was set and differs from the threat model's" in words for words in warned)
        assert (
            "norm" in logged
            or text.startswith("adv_lib")
            or float((candidates - X).abs().max()) == pytest.approx(other, rel=1e-4)
        )


@pytest.mark.parametrize(
    "text",
    [
        *("foolbox:LinfPGD(steps=1)", "art:ProjectedGradientDescent(max_iter=1, num_random_init=1)"),
        *("torchattacks:PGD(steps=1)", "adv_lib:apgd(n_iter=10)", "adv_lib:pgd_linf(steps=10)"),
        *("adv_lib:fga(max_iter=10, n_samples=3)", "adv_lib:vfga(max_iter=10, n_samples=3)"),
        # ART's generators of their own take their seeds from the system.
        *("art:HopSkipJump(max_iter=2, max_eval=20, init_eval=5)", "art:BoundaryAttack(max_iter=5)"),
    ],
)
def test_runs_depend_on_the_generator_only(text):
    host(text.partition(":")[0])
    attack = as_attack(text)
    threat_model = ThreatModel(norm=attack.traits.norms[0], epsilon=0.25)
    first = run(attack, NETWORK, X, Y, threat_model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        assert torch.equal(run(attack, NETWORK, X, Y, threat_model), first)
    assert not torch.equal(run(attack, NETWORK, X, Y, threat_model, seed=4), first)
