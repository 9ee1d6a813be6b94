"""Signs, of what attacks left, that an evaluation of a test-time defense is not to be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from robust_ext.evaluations.adaptive.cascade import OVER
from robust_ext.evaluations.adaptive.settings import CATEGORIES


def find_signs(content: Mapping[str, Any], broken: Mapping[str, tuple[int, int]]) -> list[str]:
    """Signs that the evaluation, or the defense's own, is not to be trusted (Carlini et al. 2019; section 4).

    Attacks are compared where each was run on all samples. ``broken`` is of how many samples that stood each attack
    was run on, and how many it broke, in order.
    """
    attacks = [one for one in content["defended"]["attacks"] if one["robust_accuracy"] is not None]
    found = []

    def strongest(chosen: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        return min(chosen, key=lambda attack: float(attack["robust_accuracy"]), default=None)

    def warn(low: Mapping[str, Any] | None, high: Mapping[str, Any] | None, words: str) -> None:
        if low is None or high is None:
            return
        # What is within the noise of a random defense, or one sample, means nothing.
        noise = low["deviation"] + high["deviation"] + 1.5 / content["samples"]
        if low["robust_accuracy"] < high["robust_accuracy"] - noise:
            found.append(words.format(low=low["robust_accuracy"], high=high["robust_accuracy"]))

    by_kind = {kind: strongest([a for a in attacks if a["category"] == kind]) for kind in CATEGORIES}
    warn(
        strongest([a for a in attacks if a["name"].startswith("FGSM")]),
        strongest([a for a in attacks if a["category"] == "white-box" and not a["name"].startswith("FGSM")]),
        "One step (robust accuracy {low:.3f}) is stronger than many ({high:.3f}): the iterative attacks are led "
        "astray; average over more draws, or take smaller steps.",
    )
    warn(
        by_kind["black-box"],
        by_kind["white-box"],
        "Black-box attacks (robust accuracy {low:.3f}) are stronger than white-box ones ({high:.3f}): gradients "
        "through the defense are masked.",
    )
    warn(
        by_kind["transfer"],
        by_kind["white-box"],
        "Transfer from the static model (robust accuracy {low:.3f}) is stronger than white-box attacks ({high:.3f}): "
        "they do not get through the defense.",
    )
    found += _late(content["defended"]["attacks"], broken)
    if any(one["reason"].startswith(OVER) for one in content["not_run"]):
        found.append("The time was over before everything was run: robust accuracy is an upper bound.")
    if content["random"] and content["settings"]["draws"] == 1:
        found.append("The defense is random, and gradients are of a single draw: average over several (draws).")
    if content["defended"]["clean_accuracy"] < content["static"]["clean_accuracy"] - 0.1:
        found.append("The defense costs more than ten points of clean accuracy.")
    return found


def _late(attacks: Sequence[Mapping[str, Any]], broken: Mapping[str, tuple[int, int]]) -> list[str]:
    """Black-box attacks that broke what white-box ones, on the same samples, had left."""
    kinds = [one["category"] for one in attacks]
    later = attacks[len(kinds) - kinds[::-1].index("white-box") :] if "white-box" in kinds else ()
    found = []
    for one in later:
        tried, lost = broken[one["name"]]
        # One sample means nothing.
        if one["category"] == "black-box" and one["exposure"] == "defense" and lost > 1:
            found.append(
                f"{one['name']} broke {lost} of {tried} samples that white-box attacks had left: gradients through the "
                "defense are masked."
            )
    return found
