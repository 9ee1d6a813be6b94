"""Defenses by name: settings, trained parts from files, and what is refused."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from robust_ext import DataError, InvalidArgumentError, RunFolderError, ThreatModel, as_defense, evaluate_defense
from robust_ext.core.objects import resolve_object
from robust_ext.datasets import load_dataset
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.defenses.soap import flipped_crop
from robust_ext.demo.network import digits_network
from robust_ext.registry.defense import named_defense
from tests.defenses.cases import QUICK, drawn_part, of_digits

PARTS = """
from torch import nn

def view(x):
    return 0.5 * x

def judge():
    return nn.Linear(10, 1)
"""


@pytest.fixture(scope="module")
def net():
    return digits_network()


@pytest.fixture(scope="module")
def images():
    return load_dataset("digits").take(range(4))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    found = {name: folder / f"{name}.safetensors" for name in TRAINED}
    for name, file in found.items():
        drawn_part(name, digits=True).save(file)
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory, files):
    file = tmp_path_factory.mktemp("code") / "parts.py"
    file.write_text(PARTS)
    paths = {**files, "file": file}
    return lambda text: re.sub(r"\{(\w+)\}", lambda found: paths[found[1]].as_posix(), text)


def written(name):
    settings = ", ".join(f"{key}={value!r}" for key, value in QUICK.get(name, {}).items())
    return f"{name}({settings})"


@pytest.mark.parametrize("name", NAMED)
def test_a_name_is_its_class(name, net, images, files):
    made, other = named_defense(written(name), net, images[0], weights=files.get(name)), of_digits(name, images[0])
    assert type(made) is type(other) is NAMED[name]
    with made.seeded(3), other.seeded(3), torch.no_grad():
        torch.testing.assert_close(made(images[0]), other(images[0]))
    own = [p for key, p in made.named_parameters() if not key.startswith(("classifier", "features"))]
    assert not any(p.requires_grad for p in own)


def test_settings(net, images, files):
    x = images[0]
    made = named_defense("hd(steps=5, radius=2/255, random_start=False)", net, x, bounds=(-1, 1))
    assert (made.steps, made.random, made.bounds) == (5, False, (-1.0, 1.0))
    assert made.radius == pytest.approx(4 / 255)
    soap = named_defense(" soap( crop = 1, flip=False ) ", net, x)
    assert torch.equal(soap.view(x), flipped_crop(x, crop=1, flip=False))
    # The file in the text is the one that counts.
    text = f"adp(weights={str(files['adp'])!r}, runs=3)"
    assert named_defense(text, net, x, weights="elsewhere.safetensors").runs == 3
    # Some layers are those that were fitted alone.
    whole = NAMED["clc"].part_class.load(files["clc"])
    alone = NAMED["clc"](net, type(whole)(["5"], [whole.basis(1)], [whole.mean_1]), group_size=2)
    made = named_defense("clc(layers='5', group_size=2)", net, x, weights=files["clc"])
    assert torch.equal(made(x), alone(x))


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("soap(view='{file}:view')", lambda made, x: torch.equal(made.view(x), 0.5 * x)),
        ("imf(discriminator='{file}:judge()')", lambda made, x: made.discriminator.in_features == 10),
        ("imf(discriminator='{file}:judge()', weights='{imf}')", lambda made, x: made.discriminator.in_features == 10),
        ("clc(layers=['5', ''], weights='{clc}')", lambda made, x: made.projections.layers == ("", "5")),
        ("aid(layers='2, 5', weights='{aid}')", lambda made, x: made.layers == ("2", "5")),
        ("reverse(augment={'jitter': 0.125}, weights='{reverse}')", lambda made, x: made.augment.jitter == 0.125),
    ],
)
def test_parts_in_the_text(text, holds, net, images, filled):
    assert holds(named_defense(filled(text), net, images[0]), images[0])


REFUSED = {
    "clc(layers='9', weights='{clc}')": "layers: got .*'9'.*one or more of '', '5'",
    "imf(discriminator='{file}:view')": "discriminator: got .*expected a Module",
    "reverse(augment={'jiter': 1}, weights='{reverse}')": "augment: got 'jiter'.*did you mean jitter",
    "sodef(head='{file}:judge()')": "sodef --out FILE",
    "hedge": "one of 'hd', 'anti-adversary'.*package.module:object",
    "hd(": "a name with settings as in",
    "hd(steps=max(1, 2))": "is not a literal",
    "hd(step=5)": "one of: steps.*did you mean steps",
    "aid": r"aid\(weights='FILE'\).*train_defense.py --defense aid",
    "aid(weights='{imf}')": "trained for aid",
}


def test_what_is_refused(net, images, filled):
    for text, words in REFUSED.items():
        with pytest.raises(InvalidArgumentError, match=words):
            as_defense(filled(text), net, images[0])


@pytest.mark.parametrize("name", TRAINED)
def test_files_that_cannot_be_read(name, net, images, files, tmp_path):
    with pytest.raises(DataError, match=r"no such file.*train_defense"):
        named_defense(name, net, images[0], weights=tmp_path / "missing.safetensors")
    # A pickle, nothing, zeros, other tensors, another defense's.
    bad = {tmp_path / str(place): content for place, content in enumerate((b"\x80\x04", b"", bytes(20)))}
    for file, content in bad.items():
        file.write_bytes(content)
    save_file({"weight": torch.zeros(1)}, tmp_path / "other")
    for file in (*bad, tmp_path / "other", files["adp" if name == "sodef" else "sodef"]):
        with pytest.raises(DataError, match=file.name):
            named_defense(name, net, images[0], weights=file)


SCRIPT = Path(__file__).parents[2] / "examples" / "train_defense.py"


@pytest.mark.parametrize("name", [*TRAINED, "soap"])
def test_the_script_writes_what_the_name_reads(name, net, tmp_path):
    train, save = (resolve_object(f"{SCRIPT}:{function}") for function in ("train", "save"))
    x, y = load_dataset("digits", split="train").take(range(60))
    part, file = train(name, net, x, y, epochs=1), tmp_path / "folder" / "part.safetensors"
    save(name, part, file)
    if name != "soap":
        assert named_defense(written(name), net, x[:2], weights=file)(x[:4]).shape == (4, 10)
        return
    again = digits_network(trained=False)
    again.load_state_dict(load_file(file))
    assert torch.equal(again(x[:4]), part(x[:4]))
    assert not torch.equal(again(x[:4]), net(x[:4]))


def test_settings_are_part_of_a_run(net, images, tmp_path):
    x, y = images
    threat_model = ThreatModel(norm="linf", epsilon=0.1)
    small = {"steps": 1, "queries": 2, "draws": 1, "repeats": 1}
    result = evaluate_defense("hd(steps=1)", None, x, y, threat_model, classifier=net, out=tmp_path, **small)
    kept = result.content["settings"]["defense_settings"]
    assert (kept["steps"], kept["radius"], kept["bounds"]) == (1, 8 / 255, [0.0, 1.0])
    assert json.dumps(kept)
    with pytest.raises(RunFolderError, match=r"other settings.*defense_settings"):
        evaluate_defense("hd(steps=2)", None, x, y, threat_model, classifier=net, out=tmp_path, **small)
