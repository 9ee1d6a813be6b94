"""This project's own attacks by name, as strings, classes and tuples."""

import pytest

from robust_ext.attacks.apgd import APGD
from robust_ext.attacks.random_search import RandomSearch
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.registry import adapters, as_attack


def test_names_build_them_with_settings():
    attack = as_attack("robust_ext:APGD(steps=7, loss='margin')")
    assert isinstance(attack, APGD)
    assert (attack.steps, attack.loss) == (7, "margin")
    assert attack.name == "robust_ext:APGD(steps=7, loss='margin')"
    for form in (APGD, (APGD, {"steps": 7})):
        found = as_attack(form, name="mine")
        assert isinstance(found, APGD)
        assert found.name == "mine"
    assert isinstance(as_attack(RandomSearch), RandomSearch)
    assert adapters()["robust_ext"].adapt_model(object()) is None


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("robust_ext:APDG", "did you mean APGD"),
        ("robust_ext:APGD(step=3)", r"did you mean steps\?"),
        ("robust_ext:APGD(loss='hinge')", "loss: got 'hinge'"),
        ((APGD, 3), "dict of keyword arguments"),
    ],
)
def test_what_cannot_be_built_is_explained(form, message):
    with pytest.raises(InvalidArgumentError, match=message):
        as_attack(form)


def test_listed_traits_are_those_of_what_is_built():
    for listing in adapters()["robust_ext"].list_attacks():
        built = adapters()["robust_ext"].build_attack(listing.name, listing.trial, name="x")
        assert built.traits == listing.traits
