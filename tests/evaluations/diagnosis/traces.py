"""Entries of attacks on samples, as they would be recorded, with what a test changes."""

from robust_ext import ThreatModel

LINF = ThreatModel(norm="linf", epsilon=0.1)
# A sign attack of 40 steps of a tenth of epsilon, that came to rest at the edge of the ball without success.
TRACE = {
    "queries": 41, "graphs": 40, "cut": 0, "gradients": 40, "zero": 0, "non_finite": 0, "zero_loss": 0,
    "other_label": 0, "turns": 0.05, "first": -8.0, "best": -2.0, "last": -2.0, "best_at": 30, "adversarial_at": None,
    "late": 0.0, "scale": 12.0, "saturated": 0, "reach": 1.0, "end": 1.0, "low": 0.0, "high": 1.0, "step": 0.1,
    "longest": 0.1, "follows": 1.0, "uses": 1.0, "back": 0.0, "held": 0.0, "grid": 0, "elsewhere": 0.0, "slope": 1.0,
    "shift": 0.0, "outside": 0, "unmoved": 1, "batch_queries": 41,
}  # fmt: skip
ENTRY = {"outcome": "not_adversarial", "distance": 0.1, "correct": True, "canary": None, "random_found": False}


def entry(*, trace=None, **changes):
    """One sample; ``trace`` holds what differs in its trace."""
    return {**ENTRY, "trace": {**TRACE, **(trace or {})}, **changes}


def entries(count=10, *, solved=2, trace=None, **changes):
    """Some samples that an attack did not solve, and some that it did."""
    done = entry(outcome="found", trace={"adversarial_at": 20, "best": 1.0, "last": 1.0})
    return [entry(trace=trace, **changes) for _ in range(count)] + [done] * solved
