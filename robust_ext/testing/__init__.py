"""Tests for authors and users of attacks. Needs pytest, except for the matrix of attacks.

:func:`assert_attack_passes` fails if an attack misses the points planted in a model, see
docs/unit_tests_for_attacks.md. Two base classes test the conventions of Foolbox and ART. Subclass
:class:`robust_ext.testing.foolbox_invariants.FoolboxAttackInvariants` or
:class:`robust_ext.testing.art_invariants.ArtAttackInvariants` in a test module and define how the attack is made::

    class TestMyAttack(FoolboxAttackInvariants):
        def make_attack(self):
            return MyAttack(steps=5)
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from robust_ext.testing.attack_tests import assert_attack_passes as assert_attack_passes

if "pytest" in sys.modules:
    # Their assertions then explain themselves, as those in test modules do.
    sys.modules["pytest"].register_assert_rewrite(
        "robust_ext.testing.art_invariants", "robust_ext.testing.foolbox_invariants"
    )


def __getattr__(name: str) -> Any:
    """Import the function that needs pytest on its first use: ``robust-ext attacks --matrix`` works without pytest."""
    if name != "assert_attack_passes":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from robust_ext.testing import attack_tests

    return attack_tests.assert_attack_passes
