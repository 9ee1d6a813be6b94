"""Damaged files of data, weights and suites, and trees of images."""

import shutil
import tempfile
from pathlib import Path

import numpy as np

from robust_ext.cli.models import load_model
from robust_ext.datasets import load_dataset
from robust_ext.evaluations.mead.suites import load_suite
from tests.fuzz.judging import Case, words

_DATA = {
    "npz": ("good.npz", "good.npz"),
    "idx": ("mnist/t10k-images-idx3-ubyte", "mnist"),
    "idx labels": ("mnist/t10k-labels-idx1-ubyte", "mnist"),
    "cifar": ("cifar-10-batches-bin/test_batch.bin", "cifar10"),
    "images": ("pictures/a/1.png", "pictures"),
}
_WEIGHTS = ("good.safetensors", "good.pt")
_KEYS = ("attack", "norm", "epsilons", "label", "objective", "algorithm", "objectives", "algorithms", "extra")
_VALUES = (
    *words(
        """
    'robust_ext:APGD()' 'mine.py:attack' 'foolbox:LinfPGD(steps=-1)' 3 [] 'linf' 'l2' [0.1] [nan] [inf] [-1]
    ['x'] [[0.1]] true {} 1979-05-27 '' 'robust_ext:ObjectivePGD()' ['pgd'] [3] 0x1p 1e400
"""
    ),
    "'os:system(command=\"touch ran\")'",
    "[0.1, 0.2]",
    "['kl', 'ace']",
    "'\\u001b[31m'",
    f"{'[' * 300}{']' * 300}",
)


def damaged(rng, folder):
    """Files of data and weights that are cut, flipped, lengthened, emptied or exchanged."""
    while True:
        source = rng.choice([*_DATA, *_WEIGHTS])
        yield (
            _damaged_weights(rng, folder, source) if source in _WEIGHTS else _damaged_data(rng, folder, *_DATA[source])
        )


def _damage(rng, content):
    """Bytes with something wrong, and whether they can still be a whole file."""
    kind = rng.choice(["cut", "flip", "flip", "longer", "empty", "text", "zeros", "header", "double"])
    if kind == "flip":
        place, bit = rng.randrange(len(content)), 1 << rng.randrange(8)
        return kind, content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
    head = rng.randrange(min(len(content), 128))
    return kind, {
        "cut": content[: rng.randrange(len(content))],
        "longer": content + rng.randbytes(rng.randint(1, 5000)),
        "empty": b"",
        "text": b"<html>404 not found</html>",
        "zeros": bytes(len(content)),
        "header": rng.randbytes(head) + content[head:],
        "double": content + content,
    }[kind]


def _damaged_data(rng, folder, file, spec):
    kind, content = _damage(rng, (folder / file).read_bytes())

    def call():
        with _Copied(folder, Path(file).parts[0]) as copy:
            (copy / file).write_bytes(content)
            dataset = load_dataset(str(copy / spec) if spec in ("good.npz", "pictures") else spec, root=copy)
            dataset.take(range(len(dataset)))

    meaning = {
        "flip": "a pixel, a label or padding of a whole file",
        "longer": "what readers of the format ignore after the end",
        "header": "another pixel, label or name in a whole file",
        "zeros": "black images of class 0",
        "double": "twice as many images, or what readers ignore after the end",
    }.get(kind, "")
    if file.endswith(".png") and kind == "cut" and len(content) >= (folder / file).stat().st_size - 20:
        meaning = "a picture whose pixels are whole, without its checksum or end"
    if file.endswith(".bin") and kind == "cut" and len(content) % 3073 == 0 and content:
        meaning = "fewer records"
    return Case(category="data files", call=call, words=f"{file} {kind}", meaning=meaning)


def _damaged_weights(rng, folder, file):
    kind, content = _damage(rng, (folder / file).read_bytes())

    def call():
        with _Copied(folder, file) as copy:
            (copy / file).write_bytes(content)
            load_model("digits", weights=str(copy / file))

    meaning = {
        "flip": "a weight of a whole file",
        "longer": "what zip readers ignore",
        "double": "what zip readers ignore",
    }
    return Case(category="weights", call=call, words=f"{file} {kind}", meaning=meaning.get(kind, ""))


def arrays(rng, folder):
    """``.npz`` files whose arrays are not images and labels."""
    good = np.zeros((4, 1, 8, 8), np.uint8), np.zeros(4, np.int64)
    while True:
        images = rng.choice(
            [
                np.zeros((4, 8)),
                np.zeros((0, 1, 8, 8), np.uint8),
                np.full((4, 1, 8, 8), np.nan, np.float32),
                np.full((4, 1, 8, 8), 300.0, np.float32),
                np.zeros((4, 1, 8, 8), np.int64),
                np.array(["x"] * 4),
                np.zeros((4, 1, 8, 8), complex),
                np.zeros((4, 0, 8, 8), np.uint8),
                np.zeros((4,) * 9, np.uint8),
                np.float32(3),
                np.array([None] * 4, dtype=object),
                np.zeros((4, 1, 8, 8), bool),
                np.zeros((4, 1, 8, 8), "datetime64[s]"),
                good[0],
            ]
        )
        labels = rng.choice(
            [
                np.zeros(3, int),
                np.full(4, -1),
                np.full(4, 10**12),
                np.zeros((4, 2), int),
                np.full(4, 0.5),
                np.zeros(4, bool),
                np.array([None] * 4, dtype=object),
                np.array(["cat"] * 4),
                np.full(4, np.nan),
                np.int64(1),
                np.zeros(0, int),
            ]
        )
        names = rng.choice(
            [("images", "labels"), ("x", "y"), ("a", "b"), ("images", "b"), ("x_test", "y_test"), ("\x1b[31m", "y")]
        )
        values = dict(zip(names, (images, labels), strict=True))

        def call(values=values):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                np.savez(Path(place, "x.npz"), **values)
                load_dataset(str(Path(place, "x.npz")))

        shown = f"{names} {images.dtype}{images.shape} {labels.dtype}{labels.shape}"
        yield Case(category="arrays", call=call, words=ascii(shown), meaning=_meaning_of_arrays(names, images, labels))


def _meaning_of_arrays(names, images, labels):
    if images.dtype == np.uint8 and images.shape[0] == 0 and labels.size == 0 and "b" not in names:
        return "a set of no images, from which none can be chosen"
    sound = images.dtype == np.uint8 and images.shape == (4, 1, 8, 8) and labels.dtype == bool
    return "labels False and True are classes 0 and 1" if sound and "b" not in names else ""


def suites(rng, folder):
    """TOML files that are no suites, or name code."""
    while True:
        lines = [f"{rng.choice(_KEYS)} = {rng.choice(_VALUES)}" for _ in range(rng.randint(1, 5))]
        base = ["attack = 'robust_ext:APGD()'", "norm = 'linf'", "epsilons = [0.1]"]
        head = rng.choice(
            ["[[arms]]", "[[arms]]", "[arms]", "arms = 3", "", "[[arms", "description = 3\n[[arms]]", "\x1b[31m"]
        )
        if rng.random() < 0.6:
            changed = rng.choice(lines)
            lines = [one for one in base if one.split()[0] != changed.split()[0]] + [changed]
        text = "\n".join([head, *lines])

        def call(text=text):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                file = Path(place, "x.toml")
                file.write_text(text)
                load_suite(str(file))
            assert not (folder / "ran").exists(), "a suite ran code"

        yield Case(category="suites", call=call, words=ascii(text), meaning=_meaning_of_suite(text))


def _meaning_of_suite(text):
    """A suite of attacks of libraries with finite budgets above 0; read by hand."""
    sound = text.startswith("[[arms]]\n") or text.startswith("description = 3\n[[arms]]\n")
    bad = words("os:system mine.py steps=-1 nan inf] -1 true 1979 {} 0x1p 1e400 extra [[0.1]]")
    # Labels may be any text.
    labels = ("label = '", "objective = '", "algorithm = '")
    rest = "".join(one for one in text.splitlines() if not one.startswith(labels))
    return "attacks of libraries, budgets above 0" if sound and not any(word in rest for word in bad) else ""


class _Copied:
    """A folder of its own with one entry of the workspace."""

    def __init__(self, folder, entry):
        self.source, self.entry = folder, entry

    def __enter__(self):
        self.place = tempfile.TemporaryDirectory(dir=self.source)
        source, copy = self.source / self.entry, Path(self.place.name, self.entry)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
        return Path(self.place.name)

    def __exit__(self, *_):
        self.place.cleanup()
