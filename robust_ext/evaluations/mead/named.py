"""Detectors by name: fitted on training data once, and kept for runs that go on and for other processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from robust_ext.core.errors import DataError, InvalidArgumentError
from robust_ext.core.files import make_folder, remove_drafts, replace_file
from robust_ext.core.specification import did_you_mean
from robust_ext.core.target import module_device
from robust_ext.engine.code_digest import code_digest, module_code
from robust_ext.engine.identity import inputs_digest, model_digest
from robust_ext.engine.pool import FunctionCall, call_all
from robust_ext.evaluations.mead.fitting import NAMED, SUPERVISED, fit_detector, load_detector, training_adversarials

# Adversarial examples that are made at once.
_BATCH = 250


def find_detectors(
    names: Sequence[str],
    module: nn.Module,
    clean: Tensor,
    labels: Tensor,
    *,
    attacked: int,
    preset: str,
    bounds: tuple[float, float],
    seed: int,
    folder: Path | None,
    repair: bool = False,
    fit: bool = True,
    report: Callable[[str], None],
) -> dict[str, object]:
    """Detectors by name: those of :data:`NAMED` fitted on clean inputs ``(N, ...)``, others as they were named.

    Supervised ones learn from the first ``attacked`` inputs. Fitted ones are kept in the folder and read from it, and
    fitted again there where they are damaged and ``repair`` is true. ``report`` is called with a line before each step
    that takes time. Without ``fit`` nothing is fitted or written, and a score that means nothing stands for what is not
    there yet.
    """
    if folder is not None and folder.is_dir() and fit:
        remove_drafts(folder)
    found: dict[str, object] = {}
    words = ""
    if folder is not None:
        network = f"{model_digest(module)} {code_digest(module_code(module))}"
        words = f"{network} {inputs_digest(clean, labels.tolist())} {attacked} {preset} {seed}"
    # A few letters that differ for other data, settings or networks.
    identity = hashlib.blake2b(words.encode(), digest_size=5).hexdigest()
    missing = []
    for name in names:
        if name not in NAMED:
            found[name] = _location(name)
            continue
        file = None if folder is None else folder / f"{name}-{identity}.safetensors"
        # Its place among the others.
        found[name] = _spread
        if file is not None and file.exists():
            try:
                found[name] = load_detector(name, file, module)
                continue
            except DataError as error:
                if not repair:
                    raise DataError(f"{error}, or run the same command with --repair") from error
        if fit:
            missing.append(name)
    options = {"preset": preset, "rows": attacked, "bounds": bounds, "seed": seed}
    with TemporaryDirectory() as spare:
        place = Path(spare) if folder is None else folder
        for name, content in _fitted(missing, module, clean, labels, options, report):
            file = place / f"{name}-{identity}.safetensors"
            make_folder(place)
            replace_file(file, content)
            found[name] = load_detector(name, file, module).to(module_device(module))
    return found


def _fitted(
    names: Sequence[str],
    module: nn.Module,
    clean: Tensor,
    labels: Tensor,
    options: Mapping[str, Any],
    report: Callable[[str], None],
) -> Iterator[tuple[str, bytes]]:
    """Fitted detectors as the content of files. Workers make adversarial examples and fit what takes none meanwhile."""
    given, place = {"module": module, **options}, module_device(module)
    plain, supervised = ([name for name in names if (name in SUPERVISED) is kind] for kind in (False, True))
    data = {"clean": clean, "labels": labels}
    calls: list[FunctionCall] = [(_fit, {"name": name, **data, **given}) for name in plain]
    if supervised:
        report(f"making {options['rows']} adversarial examples to train detectors on")
        for begin in range(0, options["rows"], _BATCH):
            part = slice(begin, min(begin + _BATCH, options["rows"]))
            calls.append((_attacked, {"clean": clean[part], "labels": labels[part], "start": begin, **given}))
    made: dict[int, Any] = {}
    for name in plain:
        report(f"fitting {name}")
    for number, value in call_all(calls, place=place):
        if number < len(plain):
            yield plain[number], value
        else:
            made[number] = torch.from_numpy(value)
    if supervised:
        data["adversarial"] = torch.cat([made[number] for number in sorted(made)]).to(clean.device)
    for name in supervised:
        report(f"fitting {name}")
    for number, value in call_all([(_fit, {"name": name, **data, **given}) for name in supervised], place=place):
        yield supervised[number], value


def _fit(name: str, module: nn.Module, clean: Tensor, labels: Tensor, **given: Any) -> bytes:
    with torch.random.fork_rng(devices=[]), TemporaryDirectory() as folder:
        file = Path(folder) / name
        fit_detector(name, module, clean, labels, **given).save(file)
        return file.read_bytes()


def _attacked(module: nn.Module, clean: Tensor, labels: Tensor, *, rows: int, preset: str, **given: Any) -> Any:
    return training_adversarials(module, clean, labels, **given).cpu().numpy()


def _location(name: str) -> str:
    """A name that states where a detector is."""
    if ":" not in name:
        expected = f"one of {', '.join(NAMED)}, package.module:object or file.py:object"
        raise InvalidArgumentError("detector", name, expected + did_you_mean(name, NAMED))
    return name


def _spread(inputs: Tensor) -> Tensor:
    return inputs.flatten(1).std(1)
