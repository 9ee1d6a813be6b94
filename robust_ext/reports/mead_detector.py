"""The page of one detector of a MEAD run: averages, curves, heat maps, and a row a group of arms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from robust_ext.core.wording import percent, plain, shorten, typed
from robust_ext.reports.blocks import Block, Cell, Part, Plot, Row, Section, Table, muted
from robust_ext.reports.mead_rows import (
    FEW,
    TITLE,
    averages_of,
    groups_of,
    lowest_row,
    norm_title,
    norms_of,
    objective_title,
    objectives,
    short_arm,
    with_interval,
)
from robust_ext.reports.plots import COLOURS, INK, REST, Bar, Drawing, Line, bar_plot, line_plot

_DASHES = ("-", (0, (5, 2)), (0, (5, 2, 1.2, 2)), (0, (1.3, 1.5)))


class DetectorReport:
    """The section of the page on one detector, and its part of the text."""

    def __init__(self, result: Row, detector: Row) -> None:
        self.result, self.detector, self.groups = result, detector, groups_of(detector)
        self.averages, self.styles = averages_of(result, detector), _styles(result)

    def text(self) -> list[list[Part]]:
        """Return the averages in the paper's form, norms by objectives, and a row a group."""
        columns = [None, *objectives(self.result)]
        # Objectives that do not fit beside the others go on below.
        width = max(len(shorten(objective_title(one), TITLE)) for one in columns)
        beside = 5 if width <= 8 else 90 // (2 * width + 4)
        tables = [self.averages_table(columns[start : start + beside]) for start in range(0, len(columns), beside)]
        return [[f"{plain(self.detector['name'])}: averages by norm", *tables], [self.groups_table()]]

    def section(self, anchor: str) -> Section:
        """Return averages, curves, heat maps and bars, and all numbers folded away."""
        found: list[Block | Table] = [muted(self.detector["description"]), muted(self.about())]
        if self.averages:
            table = self.averages_table([None, *objectives(self.result)])
            found += [Block("heading", "Averages by norm"), table, muted("Bold: the lowest AUROC of the row.")]
        if curves := list(self.curves()):
            title = Block("heading", "Curves of the group with the lowest AUROC, by norm")
            found += [title, Block("plots", curves, "grid")]
        if heat := heat_maps(self.result, self.detector):
            colours = f"By epsilon. Blue lies above guessing, 50, orange below; hatched: fewer than {FEW} positives."
            found += [Block("heading", "AUROC of each arm by itself"), muted(colours), Block("grid", heat)]
        if bars := self.bars():
            found.append(Block("plots", bars, "grid"))
        if not any(group.with_white_box for group in self.groups):
            found.append(muted("No arms adaptive to this detector were run. Those may get past it more often."))
        slipped = muted("Slipped through: successes that do not score above the threshold.")
        found.append(Block("fold", [self.groups_table()], "Every group"))
        found.append(Block("fold", [self.arms_table(), slipped], "Every arm"))
        return Section(plain(self.detector["name"]), found, anchor)

    def about(self) -> str:
        """Describe the detector in a few sentences."""
        detector, words = self.detector, []
        if detector["combines"]:
            words.append(f"It combines {', '.join(map(plain, detector['combines']))}.")
        if detector["random"]:
            words.append("Its scores are random.")
        if not detector["differentiable"]:
            words.append("It has no gradients, so no arm can follow them.")
        if detector["threshold"] is not None:
            asked, flagged = detector["threshold_fpr"], detector.get("achieved_fpr")
            text = f"Threshold {detector['threshold']:.4g}"
            if asked is not None:
                text += f", set to flag {percent(asked)} per cent of held-out natural samples"
            if flagged is not None:
                text += f"; it flags {percent(flagged)} per cent of those here"
            words.append(f"{text}.")
        return " ".join(words)

    def averages_table(self, objectives: Sequence[str | None]) -> Table:
        """Return a row a norm, and two columns an objective."""
        rows = []
        for norm in norms_of(self.averages):
            mine = {objective: row for (of, objective), row in self.averages.items() if of == norm}
            known = [one["auroc"] for one in mine.values() if one["auroc"] is not None]
            row: dict[str, Any] = {"": shorten(norm_title(norm), TITLE)}
            for objective in objectives:
                title, one = shorten(objective_title(objective), TITLE), mine.get(objective, {})
                worst = known and one.get("auroc") == min(known) < max(known)
                row[f"{title}\nAUROC"] = Cell(percent(one.get("auroc")), look="worst" if worst else "")
                row[f"{title}\nFPR95"] = one.get("fpr_at_95_tpr")
            rows.append(row)
        return Table(title=f"Averages of {plain(self.detector['name'])} by norm", rows=rows)

    def groups_table(self) -> Table:
        """Return a row a group and scenario, with the lowest objective and the arm with the largest attribution."""
        public, rows = any("published" in row for row in self.detector["results"]), []
        for group, words, one in ((each, *pair) for each in self.groups for pair in each.scenarios.items()):
            under, mean = "  " if group.blind is not None else f"{plain(group.name)}, ", one["successes_per_sample"]
            most, lowest = _largest_attribution(one), group.lowest if words == "blind" else "-"
            row = {
                "group": plain(group.name) if words == "blind" else f"{under}{words}",
                "arms": one["arms"],
                "successes a sample": "-" if mean is None else f"{mean:.1f}",
                "positives": one["positives"],
                "coverage": one["coverage"],
                "AUROC": with_interval(one),
                "FPR95": one["fpr_at_95_tpr"],
                "TPR5": one["tpr_at_5_fpr"],
                "lowest single": lowest,
            }
            if public:
                numbers = one.get("published") or {}
                row["published"] = f"{percent(numbers.get('auroc'))} / {percent(numbers.get('fpr_at_95_tpr'))}"
            short = most and short_arm(most[0], group.name, self.detector["name"])
            rows.append({**row, "attribution": f"{percent(most[1])} {short}" if most else "-"})
        title, wordy = f"Groups against {plain(self.detector['name'])}", (0, 10 if public else 9)
        return Table(title=title, rows=rows, words=wordy, hidden=(1, 2, 7))

    def arms_table(self) -> Table:
        """Return a row an arm."""
        rows = [
            {
                "arm": row["arm"],
                "positives": row["positives"],
                "AUROC": with_interval(row),
                "FPR95": row["fpr_at_95_tpr"],
                "TPR5": row["tpr_at_5_fpr"],
                "slipped through": row["slipped"],
                "no score": row["unscored"],
            }
            for row in self.detector["arms"]
        ]
        return Table(title=f"Arms against {plain(self.detector['name'])}", rows=rows)

    def curves(self) -> Iterator[Plot]:
        """Yield for every norm the ROC curves of the group with the lowest AUROC, of those with an epsilon if any."""
        drawn = [row for group in self.groups if (row := group.blind) is not None and _has_curve(row)]
        singles = {group.name: group.objectives for group in self.groups}
        for norm in dict.fromkeys(row["norm"] for row in drawn):
            rows = [row for row in drawn if row["norm"] == norm]
            lowest = lowest_row([row for row in rows if row["epsilon"] is not None] or rows) or rows[0]
            shown: dict[str | None, Row] = {}
            shown.update((name, row) for name, row in singles[lowest["group"]].items() if _has_curve(row))
            shown[None] = lowest
            rough = f", from {lowest['positives']} positives only" if lowest["positives"] < FEW else ""
            drawing = self.roc_plot(shown)
            yield Plot(drawing, plain(lowest["group"]), f"AUROC of all arms: {percent(lowest['auroc'])}{rough}")

    def roc_plot(self, rows: Mapping[str | None, Row]) -> Drawing:
        """Draw true over false positive rates of objectives, and of all arms together (None), which lie on top."""
        lines: list[Line] = [("", [0, 1], [0, 1], {"color": REST, "linewidth": 0.8})]
        for objective, row in rows.items():
            colour, dashes = self.styles.get(objective or "", (INK, "-"))
            style = {"color": colour, "linestyle": dashes, "linewidth": 1.3 if objective else 2.2}
            lines.append((objective_title(objective), row["curve"]["fpr"], row["curve"]["tpr"], style))
        numbers = ", ".join(f"{objective_title(one)} {percent(row['auroc'])}" for one, row in rows.items())
        about = f"detector {plain(self.detector['name'])}, group {plain(rows[None]['group'])}"
        return line_plot(
            lines,
            label=f"ROC curves of {about}; AUROC: {numbers}",
            size=(2.5, 2.2),
            columns=3,
            ticks=([0, 0.5, 1], ["0", "50", "100"]),
            xlim=(0, 1),
            ylim=(0, 1.01),
            xlabel="natural flagged, per cent",
            ylabel="caught, per cent",
            yticks=[0, 0.5, 1],
            yticklabels=["0", "50", "100"],
        )

    def bars(self) -> list[Plot]:
        """Return the attribution of each group; nothing where no group has several arms."""
        name, found = plain(self.detector["name"]), []
        arms = {arm["name"]: arm["objective"] for arm in self.result["arms"]}
        attributed = []
        for group in self.groups:
            if group.blind is not None and (most := _largest_attribution(group.blind)) is not None:
                parts = dict.fromkeys([*self.styles, None], 0.0)
                for arm, part in group.blind["attribution"].items():
                    parts[arms.get(arm)] += part
                coloured = [(part, self.styles.get(one or "", (REST, ""))[0]) for one, part in parts.items() if part]
                words = f"{percent(most[1])} {shorten(short_arm(most[0], group.name), 13)}"
                attributed.append((group.name, [Bar(parts=coloured, words=words)]))
        if attributed:
            key = {colour: objective_title(one) for one, (colour, _) in self.styles.items()} | {REST: "no objective"}
            axis = "share of samples where it scored lowest, per cent"
            drawing = bar_plot(attributed, axis=axis, label=f"Attribution by group, past detector {name}", key=key)
            largest = "To the right: the largest attribution in per cent, and its arm. Groups of one arm are left out."
            found.append(Plot(drawing, "Which arms decided", largest))
        return found


def _has_curve(row: Row) -> bool:
    return row["auroc"] is not None and bool((row.get("curve") or {}).get("fpr"))


def _largest_attribution(row: Row) -> tuple[str, float] | None:
    """Return the arm with the largest attribution, and that share; None without positives, or for an only arm."""
    shares = row.get("attribution") or {}
    return max(shares.items(), key=lambda pair: pair[1]) if len(shares) > 1 else None


def heat_maps(result: Row, detector: Row) -> list[Table]:
    """Return the AUROC of each arm by itself: a table a norm in the order of the arms, with a column an epsilon."""
    known = {arm["name"]: arm for arm in result["arms"]}
    norms: dict[str | None, list[tuple[Row, Row]]] = {}
    for numbers in detector["arms"]:
        if (arm := known.get(numbers["arm"])) is not None:
            norms.setdefault(arm["norm"], []).append((arm, numbers))
    return [_heat_map("no norm" if norm is None else norm, pairs) for norm, pairs in norms.items()]


def _heat_map(norm: str, pairs: list[tuple[Row, Row]]) -> Table:
    rows: dict[str, dict[float | None, Cell]] = {}
    # Arms adaptive to the detector, and those without an objective, come after the others.
    order = sorted(pairs, key=lambda pair: (pair[0]["adaptive_to"] is not None, pair[0]["objective"] is None))
    for arm, numbers in order:
        name = short_arm(arm["name"], arm["group"], arm["adaptive_to"])
        name += "" if arm["adaptive_to"] is None else " (white-box)"
        if arm["epsilon"] in rows.get(name, {}):
            name = f"{name} ({arm['name']})"
        positives, auroc = numbers["positives"], numbers["auroc"]
        look = "rough" if auroc is None or positives < FEW else colour(auroc)
        hint = f"{arm['name']}: AUROC {percent(auroc)}, {positives} positives"
        rows.setdefault(name, {})[arm["epsilon"]] = Cell(percent(auroc), look=look, hint=hint)
    epsilons = sorted({arm["epsilon"] for arm, _ in pairs} - {None})
    places = [*epsilons, *([None] if any(arm["epsilon"] is None for arm, _ in pairs) else [])]

    cells = [
        {norm: name, **{"none" if place is None else typed(place): row.get(place, "") for place in places}}
        for name, row in rows.items()
    ]
    return Table(title=f"AUROC of arms, {norm}", rows=cells, style="heat")


def colour(share: float) -> str:
    """Return the colour of an AUROC in [0, 1], as a style sheet writes it, from those of the page for 0, 0.5 and 1."""
    end = "high" if share >= 0.5 else "low"
    return f"color-mix(in srgb, var(--{end}) {abs(200 * share - 100):.3g}%, var(--middle))"


def _styles(result: Row) -> dict[str, tuple[str, Any]]:
    """Return colour and dashes of every objective of a result."""
    names = [row["objective"] for detector in result["detectors"] for row in detector["results"]]
    known = dict.fromkeys([*objectives(result), *(name for name in names if name is not None)])
    return {name: (COLOURS[place % 6], _DASHES[place % len(_DASHES)]) for place, name in enumerate(known)}
