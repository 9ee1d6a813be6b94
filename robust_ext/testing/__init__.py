"""Tests for whoever writes attacks: base classes that check what Foolbox and ART expect of one. Needs pytest.

Subclass :class:`robust_ext.testing.foolbox_invariants.FoolboxAttackInvariants` or
:class:`robust_ext.testing.art_invariants.ArtAttackInvariants` in a test module, give it the method that makes the
attack, and pytest runs all of it::

    class TestMyAttack(FoolboxAttackInvariants):
        def make_attack(self):
            return MyAttack(steps=5)
"""

import pytest

# Their assertions then explain themselves, as those in test modules do.
pytest.register_assert_rewrite("robust_ext.testing.art_invariants", "robust_ext.testing.foolbox_invariants")
