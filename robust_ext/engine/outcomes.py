"""What can become of a candidate: the names, and the words that texts and pages use for them."""

from __future__ import annotations

OUTCOMES = {
    "found": (
        "Found",
        "The candidate is finite, within the bounds and epsilon, and changes the prediction: the problem is solved. "
        "Only these count towards the test score.",
    ),
    "rejected": (
        "Rejected",
        "A valid input within epsilon that changes the prediction, and that the detector rejects (in the inverted "
        "test: lets pass). An example that fools both existed, and the attack missed it.",
    ),
    "not_adversarial": (
        "Not adversarial",
        "A valid input within epsilon, but the prediction did not change. An adversarial example existed, and the "
        "attack missed it.",
    ),
    "non_finite_logits": (
        "Non-finite logits",
        "A valid input within epsilon at which the model returns NaN or infinite logits. That is a fault of the model, "
        "which is not robust there; it is not what was planted.",
    ),
    "beyond_epsilon": (
        "Beyond epsilon",
        "Farther from the clean input than the threat model allows. Check the epsilon and the norm that the attack "
        "was given.",
    ),
    "out_of_bounds": (
        "Out of bounds",
        "Some values lie outside the range of valid inputs. Check the bounds and the preprocessing.",
    ),
    "not_finite": ("Not finite", "The candidate holds NaN or infinity: the attack broke down numerically."),
    "ended": ("Ended", "The attack's process ended before it returned anything: the sample was not attacked."),
    "timed_out": (
        "Timed out",
        "The attack returned nothing within its time limit and was stopped: the sample was not attacked.",
    ),
}
"""Label and meaning of each outcome, in the order of tables."""

BROKEN = ("found", "non_finite_logits")
"""Outcomes after which a sample is not robust."""

LOST = ("ended", "timed_out")
"""Outcomes of rows for which nothing came back: such samples were not attacked."""
