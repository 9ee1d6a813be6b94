"""Attacks at arm's length: each in a process of its own that has what an attacker has, see docs/threats.md."""

from robust_ext.engine.isolation.worker import CAN_ISOLATE

__all__ = ["CAN_ISOLATE"]
