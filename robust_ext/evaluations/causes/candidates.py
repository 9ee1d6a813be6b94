"""Faults of what an attack returned: the input, not its best, too early, or for other labels."""

from __future__ import annotations

from robust_ext.engine.verify import LOST
from robust_ext.evaluations.causes import remedies, step_remedies
from robust_ext.evaluations.causes.evidence import Case, Sample, number, share, typical
from robust_ext.evaluations.causes.finding import Finding
from robust_ext.evaluations.causes.gradients import MOSTLY
from robust_ext.evaluations.causes.path import FLAT, NEAR_EDGE, TURNS

# As a verdict counts them: two canaries that are moved into the class of their label are no chance.
REPAIRED = 2
# Share of gradients for another label: an attack that aims has more, and others have none.
OTHER_LABEL = 0.1
# Fewest queries of a search that can be said to have stopped early.
SEARCH = 5


def predicted_labels(case: Case) -> Finding | None:
    """Misclassified inputs were moved into their label's class, or given back: it attacks what the model predicts."""
    repaired = sum(entry.get("canary") == "repaired" for entry in case.entries)
    posed = sum(entry.get("canary") is not None for entry in case.entries)
    wrong = [one for one in case.samples if one.entry.get("correct") is False]
    fixed = [one for one in wrong if one.outcome == "not_adversarial"]
    turned = _turned_back(case)
    if repaired < REPAIRED and (len(fixed) < REPAIRED or len(fixed) < MOSTLY * len(wrong)) and not turned:
        return None
    evidence = []
    if repaired:
        evidence.append(f"It moved {repaired} of {posed} misclassified canaries into the class of their label.")
    if fixed:
        evidence.append(
            f"{len(fixed)} of {len(wrong)} samples that the model gets wrong as they are came back classified "
            "correctly, though the input itself would have done."
        )
    if turned:
        evidence.append(
            f"{case.part(turned)} came to an adversarial point, from where the loss of another label than theirs took "
            "them back."
        )
    return Finding(
        code="predicted_labels",
        cause="It attacks the labels that the model predicts instead of those it is given, which repairs "
        "misclassified inputs and overstates robust accuracy.",
        evidence=tuple(evidence),
        attack=case.name,
        samples=max(repaired, len(fixed), len(turned)),
        of=max((repaired, posed), (len(fixed), len(wrong)), (len(turned), len(case.unsolved)))[1],
        remedies=remedies.for_labels(case.attack),
    )


def _turned_back(case: Case) -> list[Sample]:
    """Samples whose gradients turned to and fro once they were adversarial, where that is for another label's loss.

    Of two classes it cannot be seen whose loss it is: then other samples have to show it.
    """

    def for_another_label(one: Sample) -> bool:
        other = share(one.count("other_label"), one.count("gradients"))
        return one.known("adversarial_at") is not None and OTHER_LABEL < other < 1 - OTHER_LABEL

    lost = case.showing(lambda one: one.known("adversarial_at") is not None)
    turned = [one for one in lost if one.count("turns") > TURNS]
    if not case.enough(turned) or len(turned) < MOSTLY * len(lost):
        return []
    return turned if sum(map(for_another_label, case.samples)) >= REPAIRED else []


def best_not_returned(case: Case) -> Finding | None:
    """An adversarial point in ball and bounds was queried, and another one returned."""
    if case.minimum_norm or (case.probe is not None and case.probe.random):
        # One may have been farther away than what came back; at another draw of the model it may be none any more.
        return None
    rows = case.showing(
        lambda one: (
            one.known("adversarial_at") is not None
            and one.count("best") > FLAT * one.scale
            and one.outcome != "rejected"
        )
    )
    if not case.enough(rows):
        return None
    at = typical(rows, lambda one: one.known("adversarial_at")) or 0.0
    queries = typical(rows, lambda one: one.known("queries")) or 0.0
    return case.finding(
        "best_not_returned",
        "It queried adversarial points within epsilon and returned others.",
        rows,
        f"In {case.part(rows)} it met an adversarial point, at query "
        f"{number(at + 1)} of {number(queries)} on the median, and came back with one that is none.",
        remedies=remedies.for_best(case.attack),
    )


def stopped_early(case: Case) -> Finding | None:
    """Nothing became adversarial before the very end of a call, and others of the same call ended there with it.

    One call alone may end so by chance; that is ruled out where calls differ in length, where the attack is set to take
    far more steps, or where several samples were solved at once, at the end of a path that had not come to its own.
    """
    solved = [one for one in case.samples if one.known("adversarial_at") is not None]
    if not solved or any(one.count("adversarial_at") < one.count("batch_queries") - 2 for one in solved):
        return None
    lengths = {one.count("batch_queries") for one in solved}
    others = [one for one in case.unsolved if one.known("adversarial_at") is None]
    together = [one for one in others if one.known("batch_queries") in lengths]
    if not case.enough(together) or len(solved) > len(together):
        return None
    planned = step_remedies.steps_of(case.attack)
    if planned is not None and min(lengths) >= planned:
        # It took all its steps.
        return None
    short = planned is not None and all(2 * length < planned for length in lengths)
    under_way = sum(one.far < NEAR_EDGE for one in together) >= MOSTLY * len(together)
    at_once = under_way and len(solved) >= REPAIRED and min(lengths) >= SEARCH
    if not short and len(lengths) == 1 and not at_once:
        return None
    return case.finding(
        "stopped_early",
        "It stops for the whole batch as soon as some of it is solved.",
        together,
        f"In no call was a sample adversarial before its last two queries ({_range(lengths)} in all), and "
        f"{len(together)} others of the same calls, not yet solved, ended with it.",
        remedies=remedies.for_batch(case.attack),
    )


def crashed(case: Case) -> Finding | None:
    """Nothing came back, or NaN did."""
    lost = [entry for entry in case.entries if entry["outcome"] in LOST]
    broken: list[Sample] = [one for one in case.unsolved if one.outcome == "not_finite"]
    rows: list[object] = [*lost, *broken]
    if not rows or not case.enough(rows):
        return None
    said = next((str(entry["error"]) for entry in lost if entry.get("error")), "")
    evidence = [f"{len(lost)} of {len(case.entries)} samples were not attacked. {said}".strip()] if lost else []
    if broken:
        evidence.append(f"{len(broken)} candidates hold NaN or infinity.")
    cause = "It broke down: nothing came back." if lost else "It broke down numerically: what came back is NaN."
    return case.finding("crashed", cause, rows, *evidence, remedies=remedies.for_crash(said))


def unmoved(case: Case) -> Finding | None:
    """Candidates equal the inputs, and nothing else was tried."""

    def shows(one: Sample) -> bool:
        return one.distance == 0 and one.count("unmoved") >= one.count("queries")

    rows = [one for one in case.unsolved if shows(one)]
    if not case.enough(rows):
        return None
    queries = typical(rows, lambda one: one.count("queries")) or 0.0
    tried = f"queried nothing else in {number(queries)} queries" if queries else "sent nothing to the model"
    return case.finding(
        "unmoved",
        "It returns the inputs as they are, and tries nothing else.",
        rows,
        f"{case.part(rows)} came back unchanged; it {tried}.",
        remedies=remedies.for_unmoved(case.attack),
    )


def _range(lengths: set[float]) -> str:
    least, most = min(lengths), max(lengths)
    return number(least) if least == most else f"{number(least)} to {number(most)}"
