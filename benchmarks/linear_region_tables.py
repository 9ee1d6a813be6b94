"""Results of ``benchmarks/linear_region.py``: kept in a file, and as Markdown tables."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# A peer's point is nearer where it is by this share.
NEARER = 0.02
# Budgets for robust accuracy, as multiples of the median distance of the nearest points of all attacks.
BUDGETS = (0.5, 0.75, 1.0, 1.25, 1.5)


class Lines:
    """Results, by what was measured; the last of each counts."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, dict[str, dict[str, Any]]()
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            self._rows[self._key(row)] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep a result."""
        self._rows[self._key(row)] = row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, key: dict[str, Any]) -> dict[str, Any]:
        """The result of a key."""
        return self._rows[self._key(key)]

    def hold(self, key: dict[str, Any], *, least: float) -> bool:
        """Whether there is a result that took at least so many CPU seconds."""
        return self._key(key) in self._rows and float(self.of(key)["seconds"]) >= least

    def take_over(self, key: dict[str, Any], *, least: float) -> None:
        """Keep the result of another seed as that of a key too, if one took so many CPU seconds and it has none."""
        for row in list(self._rows.values()):
            same = (key | {"seed": row["seed"]}).items() <= row.items()
            if same and row["seconds"] >= least and not self.hold(key, least=least):
                self.add(row | key | {"measured_with_seed": row.get("measured_with_seed", row["seed"])})

    def fitting(self, keys: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """All results of these keys, whatever the attack."""
        return [row for row in self._rows.values() if any(key.items() <= row.items() for key in keys)]

    @staticmethod
    def _key(row: dict[str, Any]) -> str:
        return json.dumps([row[name] for name in ("network", "norm", "seed", "images", "half", "attack")])


def show(rows: Sequence[dict[str, Any]], ours: str) -> None:
    """Print mean norms of all attacks, how far robust accuracy lies above the lowest, and our attack beside the best.

    The images where a peer is nearer follow.

    Args:
        rows: Results of attacks: network, norm, seed, attack, distances, classes, labels, indices, seconds, runs,
            failures.
        ours: Which attack is compared with all others.
    """
    for norm in dict.fromkeys(row["norm"] for row in rows):
        kept = [row for row in rows if row["norm"] == norm]
        networks, attacks = _distinct(kept, "network"), _distinct(kept, "attack")
        print(f"\nMean {norm} norm (CPU seconds an image)\n\n| network | " + " | ".join(attacks) + " |")
        print("|---" * (len(attacks) + 1) + "|")
        for network in networks:
            cells = [[row for row in kept if (row["network"], row["attack"]) == (network, one)] for one in attacks]
            best = min(_mean(cell) for cell in cells)
            print(f"| {network} | " + " | ".join(_cell(cell, best) for cell in cells) + " |")
        print(f"\nRobust accuracy above the lowest, {norm}: mean (largest) of {len(BUDGETS)} budgets\n")
        print("| network | " + " | ".join(attacks) + " |\n" + "|---" * (len(attacks) + 1) + "|")
        above = {network: _above([row for row in kept if row["network"] == network], attacks) for network in networks}
        for name, each in (above | {"all": torch.cat(list(above.values()))}).items():
            cells = [f"{mean:.3f} ({most:.3f})" for mean, most in zip(each.mean(0), each.amax(0), strict=True)]
            print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n| network | norm | mean, a seed each | CPU s | nearest peer | mean | CPU s | ratio | nearer by 2% |")
    print("|---" * 9 + "|")
    pairs = dict.fromkeys((row["network"], row["norm"]) for row in rows)
    found = [[row for row in rows if (row["network"], row["norm"]) == pair] for pair in pairs]
    found = [one for one in found if len(_distinct(one, "attack")) > 1]
    for one in found:
        _compare(one, ours)
    print("\nImages where a peer is nearer by 2%: its distance (class) against that of our attack")
    for one in found:
        for text in _beaten(one, ours):
            print(text)


def _above(rows: list[dict[str, Any]], attacks: list[str]) -> Tensor:
    """Robust accuracy at each budget less the lowest of all attacks, ``(budgets, attacks)``; NaN if seeds are missing.

    Source: Croce, Rauber and Hein (2019), table 1.
    """
    found = [[_length(one) for row in rows if row["attack"] == name for one in row["distances"]] for name in attacks]
    most = max(map(len, found))
    whole = torch.tensor([len(each) == most for each in found])
    distances = torch.tensor([each if len(each) == most else [math.inf] * most for each in found])
    budgets = torch.tensor(BUDGETS) * distances.amin(0).median()
    robust = (distances > budgets[:, None, None]).float().mean(2)
    return torch.where(whole, robust - robust.amin(1, keepdim=True), math.nan)


def _compare(rows: list[dict[str, Any]], ours: str) -> None:
    """Our attack beside the best peer."""
    own = [row for row in rows if row["attack"] == ours]
    others = {
        name: [row for row in rows if row["attack"] == name] for name in _distinct(rows, "attack") if name != ours
    }
    best = min(others, key=lambda name: _mean(others[name]))
    peer, images = others[best], sum(len(row["labels"]) for row in own)
    seeds = ", ".join(f"{_mean([row]):.4g}" for row in own)
    print(
        f"| {own[0]['network']} | {own[0]['norm']} | {seeds} | {_seconds(own):.2f} | {best} | {_mean(peer):.4g} | "
        f"{_seconds(peer):.2f} | {_mean(own) / _mean(peer):.3f} | {len(_beaten(rows, ours))} of {images} |"
    )


def _beaten(rows: list[dict[str, Any]], ours: str) -> list[str]:
    """A line for each image and seed where the nearest of the peers is nearer than our attack."""
    found = []
    for own in (row for row in rows if row["attack"] == ours):
        others = [row for row in rows if row["seed"] == own["seed"] and row["attack"] != ours]
        for place, index in enumerate(own["indices"]):
            peer = min(others, key=lambda row: _length(row["distances"][place]))
            theirs, mine = _length(peer["distances"][place]), _length(own["distances"][place])
            if theirs < (1 - NEARER) * mine:
                found.append(
                    f"{own['network']}, {own['norm']}, seed {own['seed']}, image {index} of class "
                    f"{own['labels'][place]}: {peer['attack']} {theirs:.4g} ({peer['classes'][place]}), "
                    f"{mine:.4g} ({own['classes'][place]})"
                )
    return found


def _distinct(rows: Iterable[dict[str, Any]], name: str) -> list[str]:
    return list(dict.fromkeys(row[name] for row in rows))


def _length(distance: float | None) -> float:
    return math.inf if distance is None else distance


def _mean(rows: list[dict[str, Any]]) -> float:
    """Of all images and seeds; infinite where one has no point."""
    lengths = [_length(one) for row in rows for one in row["distances"]]
    return sum(lengths) / len(lengths) if lengths else math.inf


def _seconds(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["seconds"] for row in rows) / sum(len(row["labels"]) for row in rows))


def _cell(rows: list[dict[str, Any]], best: float) -> str:
    if not rows:
        return ""
    mean = _mean(rows)
    if math.isinf(mean):
        lost = sum(one is None for row in rows for one in row["distances"])
        return f"{lost} not found ({_seconds(rows):.2f})"
    text = f"{mean:.4g}"
    return f"{f'**{text}**' if mean <= best else text} ({_seconds(rows):.2f})"
