"""Adversarial examples of a run folder as PNG images, which count only once they were read again and verified."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robust_ext.core.criteria import MISCLASSIFICATION, Criterion
from robust_ext.core.errors import InvalidArgumentError, MissingDependencyError
from robust_ext.core.files import make_folder, replace_file
from robust_ext.core.threat import ThreatModel
from robust_ext.engine.inputs import check_samples
from robust_ext.engine.run import candidates_name
from robust_ext.engine.run_folder import RECORDS, SavedRun
from robust_ext.engine.verify import verify

_LEVELS = 256


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Images that were written, by the ids of their samples, and samples whose candidate no longer broke the model."""

    written: dict[int, Path]
    lost: list[int]


def export_png(
    run_folder: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    module: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    threat_model: ThreatModel,
    *,
    ids: Sequence[int] | None = None,
    criterion: Criterion = MISCLASSIFICATION,
) -> Exported:
    """Write the first adversarial example that any attack found for each sample as ``sample-ID.png``.

    Each image is made, read again, and judged as a candidate: only what breaks the model as an image is written.

    Args:
        run_folder: Of an evaluation with ``evaluate`` or ``robust_accuracy`` of these samples.
        folder: Where images are written, and nothing else.
        module: The classifier in eval mode, from inputs to logits.
        inputs: The clean samples, float32 ``(N, 1 or 3, H, W)``.
        labels: Their classes, int64 ``(N,)``.
        threat_model: With ``levels=256`` and the same bounds for all values.
        ids: Of the samples; 0 to N - 1 when left out.
        criterion: When a point is adversarial, as in the evaluation.

    Raises:
        InvalidArgumentError: The inputs are no images, or the threat model has other levels.
        RunFolderError: The run folder is damaged.
        MissingDependencyError: Pillow is not installed.
    """
    inputs = check_samples(inputs, threat_model)
    if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
        raise InvalidArgumentError("inputs", f"shape {tuple(inputs.shape)}", "images (N, 1 or 3, H, W)")
    if threat_model.levels != _LEVELS or threat_model.limits is not None or threat_model.kinds is not None:
        expected = f"levels={_LEVELS}, and one pair of bounds"
        raise InvalidArgumentError("threat_model", repr(threat_model), expected)
    if not (Path(run_folder) / "attacks").is_dir():
        raise InvalidArgumentError("run_folder", str(run_folder), "the run folder of an evaluation of samples")
    known, written, lost = list(range(len(inputs)) if ids is None else ids), dict[int, Path](), set[int]()
    with torch.no_grad():
        goals = criterion.goals(labels, logits=module(inputs), ids=known)
    low, high = threat_model.bounds
    for row, candidate in _found(Path(run_folder), len(inputs)):
        if known[row] in written or candidate.shape != inputs.shape[1:]:
            continue
        image = np.rint((candidate.astype(np.float64) - low) / (high - low) * (_LEVELS - 1)).astype(np.uint8)
        content = _encoded(image)
        values = _decoded(content).astype(np.float64) / (_LEVELS - 1) * (high - low) + low
        point = torch.from_numpy(values.astype(np.float32))[None].to(inputs.device)
        x, y = inputs[row : row + 1], goals[row : row + 1]
        judge: dict[str, Any] = {"module": module, "threat_model": threat_model, "criterion": criterion}
        judged = verify(point, x, y, attack="png", **judge)
        if judged.outcomes != ("found",):
            lost.add(known[row])
            continue
        lost.discard(known[row])
        make_folder(Path(folder))
        written[known[row]] = Path(folder) / f"sample-{known[row]}.png"
        replace_file(written[known[row]], content)
    return Exported(written=dict(sorted(written.items())), lost=sorted(lost))


def _found(run_folder: Path, count: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """Rows and candidates that broke the model, of every run in a folder."""
    for path in sorted(one.parent for one in (run_folder / "attacks").glob(f"*/{RECORDS}")):
        store = SavedRun(path)
        starts = [timing["block"] for timing in store.timings()]
        for start, end in zip(starts, [*starts[1:], count], strict=True):
            records, arrays = store.block(range(start, end)), store.load(candidates_name(start))
            if arrays is None or len(arrays["candidates"]) != len(records):
                continue
            for record, candidate in zip(records, arrays["candidates"], strict=True):
                if record["outcome"] == "found" and not record.get("detected"):
                    yield record["index"], candidate


def _encoded(image: NDArray[np.uint8]) -> bytes:
    pixels, file = np.moveaxis(image, 0, -1), io.BytesIO()
    _pillow().fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)).save(file, "PNG")
    return file.getvalue()


def _decoded(content: bytes) -> NDArray[np.uint8]:
    pixels = np.asarray(_pillow().open(io.BytesIO(content)))
    return pixels[None] if pixels.ndim == 2 else np.moveaxis(pixels, -1, 0)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError('PNG images need Pillow: pip install "robust-ext[cli]"') from error
    return Image
