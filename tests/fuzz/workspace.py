"""The folder in which bad inputs are tried: code, weights, data and run folders, whole and damaged."""

import pickle

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from robust_ext import ThreatModel, binarization_test
from robust_ext.demo.network import digits_network

CODE = """
import sys
import torch
from robust_ext.demo.network import digits_network
from robust_ext.detectors import Detector

number, text, nothing, listed = 3, "digits", None, [1, 2]
ready = digits_network()

def make(): return digits_network()
def needs(depth): return digits_network()
def fails(): raise ValueError("\\x1b[31mno")
def quits(): sys.exit(0)
def endless_text(): return "mine.py:endless_text"
def nothing_made(): return None
def score(x): return x.flatten(1).std(1)
def bad_score(x): return x
def text_score(x): return "high"
def nan_score(x): return x.flatten(1).mean(1) * float("nan")
def failing_score(x): raise KeyError("score")
def attack(model, x, y): return x
def two(model, x): return x
def failing_attack(model, x, y): raise KeyError("attack")
def quitting_attack(model, x, y): sys.exit(0)
def text_attack(model, x, y): return "x"
def short_attack(model, x, y): return x[:1]
def integer_attack(model, x, y): return x.long()
def double(model, x, y): return x.double()
def purifier(x): return x.round()
def bad_purifier(x): return x[:1]
def text_purifier(x): return "x"
def failing_purifier(x): raise KeyError("purifier")
def defense(classifier): return lambda x: x
def bad_defense(classifier): return 3
def detector(classifier): return 3

class Wrong(torch.nn.Module):
    kind = "none"
    def forward(self, x):
        logits = ready(x)
        return {"none": None, "text": "logits", "one": logits[:, :1], "nan": logits * float("nan"), "row": logits[:1],
                "flat": logits.flatten(), "softmax": logits.softmax(1), "int": logits.long(), "tuple": ("a", None),
                "inf": logits / 0, "complex": logits * 1j, "empty": logits[:, :0]}[self.kind]

class Unfitted(Detector):
    def score_of(self, seen): raise RuntimeError("not fitted")

def wrong(kind):
    made = Wrong().eval()
    made.kind = kind
    return made

class Raises(torch.nn.Module):
    def forward(self, x): raise RuntimeError("shape")
raises = Raises().eval()
small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3, 2)).eval()
"""


def prepare(folder):
    """Write everything into a folder."""
    (folder / "mine.py").write_text(CODE)
    (folder / "syntax.py").write_text("def broken(:")
    (folder / "exits.py").write_text("import sys; sys.exit(0)")
    (folder / "raises.py").write_text("raise KeyError('\x1b]0;x')")
    (folder / "empty.py").write_text("")
    (folder / "latin.py").write_bytes(b"# -*- coding: utf-8 -*-\nname = '\xff'")
    state = digits_network().state_dict()
    save_file(state, folder / "good.safetensors")
    torch.save(state, folder / "good.pt")
    torch.save([1, 2], folder / "list.pt")
    torch.save({"state_dict": 3}, folder / "odd.pt")
    torch.save({key: value * float("nan") for key, value in state.items()}, folder / "nan.pt")
    save_file({"0.weight": torch.zeros(3)}, folder / "other.safetensors")
    (folder / "pickled.pt").write_bytes(pickle.dumps(print))
    images = np.random.default_rng(0).integers(0, 256, (12, 1, 8, 8)).astype(np.uint8)
    labels = np.arange(12) % 10
    np.savez(folder / "good.npz", images=images, labels=labels)
    _write_idx(folder / "mnist", images[:, 0], labels)
    _write_cifar(folder / "cifar-10-batches-bin", labels)
    for label in "ab":
        (folder / "pictures" / label).mkdir(parents=True)
        for number in range(3):
            Image.fromarray(images[number, 0]).save(folder / "pictures" / label / f"{number}.png")
    (folder / "in the way").write_text("a file")
    (folder / "loop").symlink_to("loop")
    _write_runs(folder)


def _write_runs(folder):
    """Run folders of the binarization test: one of another epsilon, and one that is damaged."""
    network, x = digits_network(), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for name, damage in (("other run", None), ("damaged run", b"\xff\x00")):
        binarization_test(
            network,
            "robust_ext:APGD(steps=1)",
            x,
            ThreatModel(norm="linf", epsilon=0.3),
            out=folder / name,
            **{"inner_points": 10, "random_inner": 2, "random_corners": 2, "canaries": 0},
        )
        if damage:
            (folder / name / "records.jsonl").write_bytes(damage)


def _write_idx(folder, images, labels):
    folder.mkdir()
    for name, values in (("images", images), ("labels", labels.astype(np.uint8))):
        header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
        (folder / f"t10k-{name}-idx{values.ndim}-ubyte").write_bytes(header + values.tobytes())


def _write_cifar(folder, labels):
    folder.mkdir()
    rows = np.random.default_rng(1).integers(0, 256, (len(labels), 3073)).astype(np.uint8)
    rows[:, 0] = labels
    for name in ("test_batch.bin", *(f"data_batch_{number}.bin" for number in range(1, 6))):
        (folder / name).write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
