"""The result of a binarization test, with one or two tests an attack."""

from __future__ import annotations

from collections.abc import Sequence

from robust_ext.core import finding_texts as findings
from robust_ext.core.errors import InvalidArgumentError
from robust_ext.core.wording import attack_title, count, interval, plain, seconds, share
from robust_ext.engine.verify import LOST, OUTCOMES, UNDONE
from robust_ext.reports import blocks
from robust_ext.reports.blocks import Block, Cell, Part, Plot, Report, Row, Section, Table, muted
from robust_ext.reports.hardness import hardness_section
from robust_ext.reports.plots import (
    COLOURS,
    MARKERS,
    RANDOM,
    REST,
    SCORE,
    Bar,
    Drawing,
    Line,
    bar_plot,
    line_plot,
)

_VERDICTS = {
    "passed": "Adversarial examples were planted, and found; of several attacks, the strongest counts. This takes away "
    "one reason to doubt the evaluation. It does not prove that no stronger attack exists.",
    "failed": "",
    "inconclusive": "The test could not separate a strong attack from a weak one here. This is neither a pass nor a "
    "fail.",
}
_MIXED = (
    "One strong attack is enough for an evaluation. The others missed adversarial examples that were there: a robust "
    "accuracy measured with them alone shows more about them than about the network."
)
_SKIPPED = {
    "not_separable": (
        "Not separable",
        "No linear readout separated the inner points from the boundary points, so no problem could be built. Not part "
        "of the score.",
    ),
    "not_planted": (
        "Not planted",
        "The planted example was no longer adversarial when it was checked through the whole network. Not part of the "
        "score.",
    ),
}
_CANARIES = (
    "Canaries are planted problems posed with the wrong label: they are misclassified from the start, and leave an "
    "attack nothing to do. An attack that moves them into the class of that label runs against predicted labels "
    "instead of the ones it was given."
)
_READING = (
    "When an attack finds no adversarial example, the network may be robust, or the attack may be weak. This test "
    "tells the two apart. It turns the network into many small two-class problems around clean inputs, each with an "
    "adversarial example planted within the threat model, and runs the attack on them."
)
_TERMS = {
    "Test score": "The share of planted problems that the attack solved. Every one can be solved, so a strong attack "
    "comes close to 1.",
    "R-ASR": "The random attack success rate: what guessing at random solves on the same problems. If it is high, the "
    "problems are easy, and a high test score shows little.",
    "Kappa": "How close the decision boundary lies to the planted point. Towards 1, the room to find it shrinks.",
}
_TWICE = (
    "Planted examples go undetected in the regular test and are detected in the inverted one. An attack that passes "
    "only one of them may ignore the detector or the classifier; its score is the lower of the two. The column planted "
    "counts samples in which an example could be planted, of all that were drawn."
)
_DEPTHS = (
    "Depth 1 is the planted point. A strong attack often goes many times as far, so an attack that makes a tenth of "
    "its progress still passes. Deeper problems have the same readout with the boundary moved away, and are posed "
    "wherever a witness proves that they can be solved: a verified point found by any of the attacks, by this "
    "project's APGD, or by Square, which needs no gradient. An attack that falls behind the broad line (proved by "
    "witnesses) misses adversarial examples that others find."
)


def report(result: Row) -> Report:
    """Return the report: verdict and reasons, an attack a row, and what became of the problems.

    Where an attack went through the regular and the inverted test, both have a row below its own.
    """
    for owner in (result, *result["attacks"]):
        if owner.get("verdict") not in _VERDICTS:
            raise InvalidArgumentError("verdict", owner.get("verdict"), "one of " + ", ".join(map(repr, _VERDICTS)))
    attacks, verdict, threshold = result["attacks"], result["verdict"], result["settings"]["threshold"]
    twice = any("tests" in attack for attack in attacks)
    tests = [
        {**one, "name": f"{attack['name']} ({test})"} if test else one
        for attack in attacks
        for test, one in attack.get("tests", {"": attack}).items()
    ]
    number = len(attacks)
    passed, failed = (sum(one["verdict"] == kind for one in attacks) for kind in ("passed", "failed"))
    table, bars = _attacks(attacks, threshold), _bars(tests, threshold)
    confidence = f"{100 * result['settings'].get('confidence', 0.95):g}%"
    caption = (
        f"Solid bars: test score. Hatched bars: R-ASR on the same problems. Thin lines: {confidence} intervals. "
        f"Dashed line: the test score needed to pass, {threshold}."
    )
    mixed = verdict == "passed" and failed > 0
    counted = f"{passed} of {number} attacks pass{f', {failed} fail' if failed else ''}"
    # Of two tests the lower score counts.
    lowest = [min(one.get("tests", {"": one}).values(), key=lambda test: test["score"] or 0.0) for one in attacks]
    best = max(lowest, key=lambda one: one["score"] or 0.0)
    score = (
        f"Highest test score: {share(best['score'], threshold)} (two-sided {confidence} interval "
        f"{' to '.join(f'{end:.2f}' for end in best['score_interval'] or ())})."
    ) * (best["score_interval"] is not None)
    return Report(
        title=f"Binarization test: {verdict}",
        about=f"Binarization test of {count(number, 'attack')}{' on a classifier with a detector' * twice}",
        headline=counted if 0 < passed < number else verdict,
        verdict="mixed" if mixed else verdict,
        first=[
            Block("words", " ".join(filter(None, [_bare(result["reason"]), score]))),
            *([] if verdict == "failed" else [muted(_MIXED if mixed else _VERDICTS[verdict])]),
        ],
        sections=[
            Section(
                "Does each attack find what was planted?",
                [*([muted(_TWICE)] if twice else []), table, Block("plots", [Plot(bars, "", caption)])],
                open=True,
            ),
            Section("What the test does, and its terms", [Block("words", _READING), Block("terms", _TERMS.items())]),
            Section("Why each attack has its verdict", [Block("terms", _reasons(attacks))]),
            *blocks.evidence(result, result.get("warnings", ())),
            _outcomes(tests, twice),
            *_depths(result, tests),
            *hardness_section(result, tests),
            Section("Examples", [Block("pictures", None)]),
        ],
        text=_text(result, table),
        badge=("attack finds what is planted", verdict, verdict),
        figure=bars,
    )


def _bare(reason: str) -> str:
    """Return a reason without the cause and the remedy, which stand next to it."""
    return reason.partition(" Most likely cause: ")[0]


def _reasons(attacks: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what decided on each attack, with those that share it."""
    names: dict[tuple[str, str], list[str]] = {}
    for one in attacks:
        names.setdefault((one["verdict"], one["reason"]), []).append(attack_title(one))
    return [(f"{', '.join(several)}: {verdict}", reason) for (verdict, reason), several in names.items()]


def _text(result: Row, table: Table) -> list[list[Part]]:
    """Return the table, reasons, findings missing from the reasons, warnings, and the verdict."""
    setup, others = findings.divided(result.get("findings", ()))
    reasons = " ".join(attack["reason"] for attack in result["attacks"])
    stated = {one["code"] for one in result.get("findings", ()) if findings.sentence(one) in reasons}
    leading = findings.leading(others)
    unstated = [one for one in leading if one["code"] not in stated]
    above, found = findings.lines(setup), findings.lines(unstated)
    # The verdict is not repeated, nor are reasons that several attacks share.
    why: dict[str, list[str]] = {}
    for one in result["attacks"]:
        if not plain(result["reason"]).endswith(plain(one["reason"])):
            why.setdefault(one["reason"], []).append(attack_title(one))
    below = [f"{', '.join(names)}: {plain(reason)}" for reason, names in why.items()]
    warned = [f"Warning: {plain(warning)}" for warning in result.get("warnings", ())]
    verdict = f"Verdict: {result['verdict'].upper()}. {plain(result['reason'])}"
    pasted = findings.first_to_paste(one for one in leading if one not in unstated)
    return [[above], [table], [*below, found, *warned], [verdict, pasted]]


def _attacks(attacks: Sequence[Row], threshold: float) -> Table:
    rows = []
    for attack in attacks:
        tests = attack.get("tests", {"": attack})
        if "" not in tests:
            # An attack that was tested twice has no numbers of its own but its score.
            score = share(attack["score"], threshold)
            rows.append({"attack": attack_title(attack), "verdict": attack["verdict"], "test score": score})
        for name, one in tests.items():
            canaries, searched = one["canaries"], one.get("random_samples", one["samples"])
            # Random search need not run on all problems.
            fewer = "" if searched == one["samples"] else f" of {searched}"
            row = {
                "attack": f"  {name}" if name else attack_title(one),
                "verdict": one["verdict"],
                "test score": Cell(share(one["score"], threshold), interval(one["score_interval"])),
                "R-ASR": Cell(share(one["random_score"], threshold) + fewer, interval(one["random_score_interval"])),
                "depth": depth_words(one),
                "planted": f"{one['samples']} of {one['planting']['samples']}" if "planting" in one else one["samples"],
                "canaries": f"{canaries['repaired']} of {canaries['planted']}" if canaries["planted"] else "-",
                "seconds": seconds(one["seconds"]["total"]),
            }
            rows.append(row)
    return Table(title="Attacks", rows=rows, words=(0, 1), terse=("R-ASR",))


def _outcomes(tests: Sequence[Row], twice: bool) -> Section:
    """Return the outcomes that any test may have, and others where they occurred."""
    rare = ("non_finite_logits", UNDONE, *LOST)
    shown = {
        key: meaning
        for key, meaning in OUTCOMES.items()
        if (twice if key == "rejected" else key not in rare or any(one["outcomes"].get(key) for one in tests))
    }
    rows = []
    for one in tests:
        found = {title: one["outcomes"].get(key, 0) for key, (title, _) in shown.items()}
        skipped = {title: one[key] for key, (title, _) in _SKIPPED.items()}
        rows.append({"attack": attack_title(one), **found, **skipped})
    meanings = [*shown.values(), *_SKIPPED.values(), ("Canaries repaired", _CANARIES)]
    checked = muted("Every candidate is checked again here; what an attack reports of its own success does not count.")
    table = Table(title="Outcomes", rows=rows)
    return Section("What became of the problems", [checked, table, Block("terms", meanings, "columns")])


def _bars(tests: Sequence[Row], threshold: float) -> Drawing:
    """Return bars of every attack's test score and R-ASR, with their intervals and the threshold."""

    def bar(attack: Row, kind: str, words: str, colour: str) -> Bar:
        value = attack[kind]
        shown = "no" if value is None else share(value, threshold)
        parts = [] if value is None else [(value, colour)]
        return Bar(parts=parts, words=f"{shown} {words}", interval=attack[f"{kind}_interval"])

    rows = [
        (attack_title(one), [bar(one, "score", "score", SCORE), bar(one, "random_score", "R-ASR", RANDOM)])
        for one in tests
    ]
    line = (threshold, f"pass from {threshold:g}")
    return bar_plot(
        rows, axis="share of planted problems solved", label="Test score and R-ASR of each attack", line=line
    )


def depth_words(attack: Row) -> str:
    """Return the depth up to which an attack solves proved problems, with a plus where nothing deeper was posed."""
    depth, depths = attack.get("depth"), attack.get("depths") or []
    return "-" if depth is None else f"{depth:g}{'+' if depth == depths[-1]['depth'] else ''}"


def _depths(result: Row, tests: Sequence[Row]) -> list[Section]:
    """Return plots of a few attacks each, which would not be told apart otherwise, and all numbers."""
    deeper = [one for one in tests if len(one.get("depths") or []) > 1]
    if not deeper:
        return []
    threshold, posed = result["settings"]["threshold"], {*result["settings"].get("depths", ())}
    groups = [deeper[start : start + len(COLOURS)] for start in range(0, len(deeper), len(COLOURS))]
    column = (
        f"The column depth of the attacks' table has the depth up to which an attack solves {threshold} of what is "
        "proved; a plus marks the deepest one that was posed to it."
    )
    rows = [
        {
            "attack": attack_title(one),
            "at depth": f"{row['depth']:g}",
            "proved": row["problems"],
            "solved": row["found"],
            "score": Cell(share(row["score"], threshold), interval(row["score_interval"])),
            "R-ASR": share(row["random_score"], threshold),
            "proved by others": row["problems_by_others"],
            "of these solved": row["found_by_others"],
        }
        for one in tests
        for row in one.get("depths") or ()
    ]
    table = Table(title="Depths", rows=rows)
    shown = Block("plots", [Plot(_depth_plot(group, posed)) for group in groups])
    return [Section("How deep does each attack go?", [Block("words", _DEPTHS), muted(column), shown, table])]


def _depth_plot(attacks: Sequence[Row], posed: set[float]) -> Drawing:
    """Draw the share of samples that each attack solves at every depth, and the share that is proved to be solvable."""
    depths = sorted({row["depth"] for attack in attacks for row in attack["depths"]} | posed)

    def shares(attack: Row, key: str) -> list[float]:
        # Nothing was posed, and so nothing solved, at the other depths.
        known = {row["depth"]: row[key] / (row.get("samples", attack["samples"]) or 1) for row in attack["depths"]}
        return [known.get(depth, 0.0) for depth in depths]

    # Attacks may have stopped after other samples; proved problems are those of the attack with most samples.
    most = max(attacks, key=lambda attack: attack["samples"])
    lines: list[Line] = [("proved by witnesses", depths, shares(most, "problems"), {"color": REST, "linewidth": 4.5})]
    for number, attack in enumerate(attacks):
        style = {"color": COLOURS[number], "marker": MARKERS[number], "linestyle": "--" if number % 2 else "-"}
        lines.append((attack_title(attack), depths, shares(attack, "found"), style))
    label = "Share of planted samples solved against the depth of the boundary"
    ticks, place = (depths, [f"{depth:g}" for depth in depths]), (depths[0] / 1.15, depths[-1] * 1.15)
    return line_plot(
        lines, label=label, ticks=ticks, xscale="log", xlabel="depth of the boundary", xlim=place, ylim=(0, 1.02)
    )
