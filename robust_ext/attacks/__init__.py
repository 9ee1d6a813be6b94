"""Attacks and their common interface."""

from robust_ext.attacks.base import Attack as Attack
from robust_ext.attacks.base import AttackTraits as AttackTraits
from robust_ext.attacks.base import CallableAttack as CallableAttack
