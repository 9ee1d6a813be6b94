"""Options that choose what counts as success of an attack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from robust_ext.cli.loading import Samples
from robust_ext.core.criteria import RULES, Criterion, MultiLabel, Targeted, TopK
from robust_ext.core.errors import InvalidArgumentError, warn
from robust_ext.core.settings import Settings, setting, settings_class


@settings_class
class CriterionOptions(Settings):
    """The criterion of a command; misclassification without any of them."""

    top: int | None = setting(
        default=None,
        help="An attack has to get the true class out of this many largest logits; with --targets, the target into "
        "them.",
        minimum=1,
        panel="attack",
    )
    targets: str | None = setting(
        default=None,
        help="An attack has to reach a target class: next, random, likeliest (at the clean input), a class number, or "
        "FILE.npy with one for each sample of the data.",
        panel="attack",
    )
    multi_label: str | None = setting(
        default=None,
        help="Labels are rows of zeros and ones, and an attack has to change one of them: all, or columns as in 0,3.",
        panel="attack",
    )

    def choose(self, samples: Samples, *, seed: int) -> tuple[Criterion | None, Samples]:
        """Return the criterion and the samples, without those whose true class is the target of all."""
        given = {"--top": self.top, "--targets": self.targets, "--multi-label": self.multi_label}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) > 1 and "--multi-label" in chosen:
            raise InvalidArgumentError("--multi-label", self.multi_label, f"nothing beside {chosen[0]}: one criterion")
        if self.multi_label is not None:
            return MultiLabel(None if self.multi_label == "all" else _columns(self.multi_label)), samples
        if self.targets is None:
            return None if self.top is None else TopK(self.top), samples
        k = 1 if self.top is None else self.top
        if self.targets.isdecimal():
            return Targeted(int(self.targets), k=k), _without(samples, int(self.targets))
        if self.targets in RULES:
            return Targeted(self.targets, seed=seed, k=k), samples
        return Targeted(_read(Path(self.targets), len(samples.dataset))[samples.ids], k=k), samples


def _columns(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError("--multi-label", text, "all, or columns of the labels, as in 0,3")
    return tuple(map(int, parts))


def _without(samples: Samples, target: int) -> Samples:
    """Leave out samples of the target class: they are where an attack has to go."""
    kept = (samples.labels != target).nonzero().flatten()
    if len(kept) == len(samples.labels):
        return samples
    if not len(kept):
        raise InvalidArgumentError("--targets", target, "another class than that of all samples")
    warn(f"{len(samples.labels) - len(kept)} samples of class {target}, which is the target, are left out")
    ids = [samples.ids[row] for row in kept.tolist()]
    return replace(samples, ids=ids, inputs=samples.inputs[kept], labels=samples.labels[kept])


def _read(path: Path, samples: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    expected = f"{', '.join(RULES)}, a class number, or a .npy file of {samples} integers, one for each sample"
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidArgumentError("--targets", str(path), f"{expected} ({error})") from error
    if not isinstance(found, np.ndarray) or found.shape != (samples,) or found.dtype.kind not in "iu":
        shown = f"{path} of shape {getattr(found, 'shape', None)} and dtype {getattr(found, 'dtype', None)}"
        raise InvalidArgumentError("--targets", shown, expected)
    return found.astype(np.int64)
