"""Small cases of every published defense; what holds for all of them, for some, and for their names and files."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robust_ext import BPDA, ThreatModel, as_defense, evaluate_defense
from robust_ext.core.errors import DataError, InvalidArgumentError, ModelError, RunFolderError
from robust_ext.core.objects import resolve_object
from robust_ext.core.random import seeded_globals
from robust_ext.core.settings import declared
from robust_ext.core.target import PassCounter, count_calls
from robust_ext.datasets import load_dataset
from robust_ext.defenses import Discriminator
from robust_ext.defenses.adp import ScoreNetwork
from robust_ext.defenses.catalogue import NAMED, TRAINED
from robust_ext.defenses.clc import Projections
from robust_ext.defenses.reverse import ContrastiveHead
from robust_ext.defenses.sodef import StableHead
from robust_ext.defenses.training.views import RandomViews
from robust_ext.demo.network import digits_network
from robust_ext.registry.defense import named_defense
from tests.attacks.problems import Lambda

SHAPE = (2, 6, 5)
GROUPED = ("clc", "reverse")
# With which a few rows are defended in no time.
QUICK = {
    "soap": {"radii": 4},
    "sodef": {"solver": "rk4", "steps": 2},
    "clc": {"group_size": 2},
    "reverse": {"group_size": 2, "steps": 2},
    "adp": {"runs": 2, "steps": 2},
    "randomized-smoothing": {"samples": 4},
    "resize-pad": {"smallest": 0.5, "largest": 1.0},
}


def network(dtype=torch.float64, bounds=(0.0, 1.0)):
    with seeded_globals(0):
        parts = nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 4)
        return nn.Sequential(Lambda(lambda x: (x - bounds[0]) / (bounds[1] - bounds[0])), *parts).eval().to(dtype)


def data(rows, dtype=torch.float64, low=0.0, high=1.0):
    unit = torch.rand(rows, *SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (low + (high - low) * unit).to(dtype)


def seeds(rows):
    return torch.arange(rows) + 11


def drawn_part(name, *, digits=False):
    """A part of the sizes of :func:`network`, or of the digits' network."""
    features, classes, channels, size = (128, 10, 1, 64) if digits else (8, 4, 2, 60)
    with seeded_globals(1):
        return {
            "imf": lambda: Discriminator([classes], width=8, after=1),
            "aid": lambda: Discriminator([32, 128] if digits else [3, 8], layers=("2", "5"), width=8, after=1),
            "sodef": lambda: StableHead(features, classes, dimension=6, hidden=7),
            "clc": lambda: Projections(
                ["", "5" if digits else "4"],
                [torch.linalg.qr(torch.randn(n, n // 2))[0] for n in (size, 512 if digits else 36)],
                [torch.rand(n) for n in (size, 512 if digits else 36)],
            ),
            "reverse": lambda: ContrastiveHead(features, width=5, dimension=3, views=RandomViews(area=0.5, flip=0.0)),
            "adp": lambda: ScoreNetwork(channels, width=5, depth=2, noise=0.2),
        }[name]()


def make(name, dtype=torch.float64, bounds=(0.0, 1.0), *, net=None, inputs=None, **settings):
    """The defense of :func:`network`, or of the digits' network ``net`` where ``inputs`` are given."""
    net = network(dtype, bounds) if net is None else net
    inputs = data(2, dtype, *bounds) if inputs is None else inputs
    defense = NAMED[name]
    if defense.part_class is not None:
        part = drawn_part(name, digits=inputs.shape[1:] == (1, 8, 8)).to(dtype)
        settings |= defense.part_arguments(part, net, inputs)
    if "bounds" in inspect.signature(defense).parameters:
        settings["bounds"] = bounds
    return defense(net, **settings)


def quick(name, *args, **settings):
    return make(name, *args, **{**QUICK.get(name, {}), **settings})


def of_digits(name, inputs, **settings):
    """The same for the digits' network."""
    return quick(name, torch.float32, net=digits_network(), inputs=inputs, **settings)


def gradient(module, x, weights):
    leaf = x.clone().requires_grad_()
    found: Tensor
    (found,) = torch.autograd.grad((module(leaf) * weights).sum(), leaf)
    return found


ALL = pytest.mark.parametrize("name", NAMED)
# Rows forward and backward through the classifier for a row, by default and for k steps.
COUNTS = {
    "hd": ((21, 20), lambda k: (k + 1, k)),
    "anti-adversary": ((4, 2), lambda k: (k + 2, k)),
    "imf": ((2, 1), lambda k: (k + 1, k)),
    "aid": ((11, 10), lambda k: (k + 1, k)),
    "soap": ((133, 110), lambda k: (22 * (k + 1) + 1, 22 * k)),
    "clc": ((6, 0), lambda k: (k + 1, 0)),
    "adp": ((10, 0), lambda k: (10, 0)),
    # The encoder is on the classifier's own features: four views a step.
    "reverse": ((161, 160), lambda k: (4 * k + 1, 4 * k)),
    "sodef": ((1, 0), lambda k: (1, 0)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_passes_are_those_that_are_documented(name):
    grouped = {"group_size": 3} if name in GROUPED else {}
    grouped |= {"solver": "rk4"} if name == "sodef" else {}
    by_default, of_steps = COUNTS[name]
    for settings, wanted in (({}, by_default), ({"steps": 3}, of_steps(3))):
        defense, counter = make(name, torch.float32, **grouped, **settings), PassCounter()
        with count_calls(defense.classifier, counter), torch.no_grad():
            defense(data(3, torch.float32))
        assert (counter.forward, counter.backward) == (3 * wanted[0], 3 * wanted[1])


@ALL
def test_the_callers_mode_changes_nothing_and_nothing_is_left_behind(name):
    defense, x = quick(name), data(4)
    expected = defense.trace(x, seeds=seeds(4))
    before = torch.get_rng_state()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            trace = defense.trace(data(4), seeds=seeds(4))
        torch.testing.assert_close(trace.logits, expected.logits)
        assert not any(t.requires_grad for t in (trace.logits, *trace.iterates, *trace.state.values()))
    assert torch.equal(torch.get_rng_state(), before)
    leaf = x.clone().requires_grad_()
    with defense.seeded(1):
        torch.autograd.grad(BPDA(defense)(leaf).sum(), leaf)
        torch.autograd.backward(BPDA(defense, backward="unrolled")(leaf).sum())
        torch.autograd.grad(defense(leaf).sum(), leaf)
    assert all(parameter.grad is None for parameter in defense.parameters())
    assert torch.equal(x, data(4))
    assert all(not part._forward_pre_hooks and not part._forward_hooks for part in defense.modules())


@ALL
def test_rows_or_groups_are_on_their_own(name):
    defense, x = quick(name), data(4)
    whole = defense.trace(x, seeds=seeds(4))
    size = defense.group_size or 1
    for start in range(0, 4, size):
        rows = slice(start, start + size)
        alone = defense.trace(x[rows], seeds=seeds(4)[rows])
        torch.testing.assert_close(alone.final, whole.final[rows])
        torch.testing.assert_close(alone.logits, whole.logits[rows])
    assert len(whole.iterates) == (1 if name in ("sodef", "resize-pad") else defense.steps + (name != "clc"))
    assert torch.equal(whole.iterates[-1], whole.final) or name == "clc"
    if name in GROUPED:
        mixed = defense.trace(x[[0, 3]], seeds=seeds(4)[[0, 3]])
        assert not torch.allclose(mixed.logits[0], whole.logits[0], rtol=0, atol=1e-12)
        with pytest.raises(ModelError, match="batch of 3 rows, expected a whole number of groups of 2"):
            defense(x[:3])
        assert quick(name, pad=True)(x[:3]).shape == (3, 4)


@ALL
def test_no_row_and_one_row_and_draws_that_repeat_with_their_seed(name):
    defense = quick(name, **({"group_size": 2, "pad": True} if name in GROUPED else {}))
    for rows in (0, 1):
        leaf = data(rows).requires_grad_()
        for module in (defense, BPDA(defense, backward="unrolled"), BPDA(defense)):
            out = module(leaf)
            assert out.shape == (rows, 4)
            assert torch.autograd.grad(out.sum(), leaf)[0].shape == (rows, *SHAPE)
        assert defense.trace(data(rows)).final.shape == (rows, *SHAPE)
    # Many steps of the hedge defense end in the same corners from wherever they start; votes are often the same.
    defense, x = quick(name, **{"hd": {"steps": 1}, "randomized-smoothing": {"vote": "mean"}}.get(name, {})), data(4)
    for fixed in (True, False):
        with torch.no_grad(), defense.seeded(2, fixed=fixed):
            assert torch.equal(defense(x), defense(x)) == (fixed or not defense.random)


@ALL
@pytest.mark.parametrize("bounds", [(-1.0, 3.0), (0.0, 255.0)])
def test_other_bounds_are_the_same_stretched(name, bounds):
    x, width = data(4), bounds[1] - bounds[0]
    unit = quick(name).trace(x, seeds=seeds(4))
    other = quick(name, bounds=bounds).trace(bounds[0] + width * x, seeds=seeds(4))
    for one, two in zip(unit.iterates, other.iterates, strict=True):
        torch.testing.assert_close((two - bounds[0]) / width, one, rtol=0, atol=1e-6 if name == "jpeg" else 1e-9)
    torch.testing.assert_close(other.logits, unit.logits, rtol=1e-5, atol=1e-6)
    if name != "jpeg":
        # Half precision stays.
        trace = quick(name, torch.bfloat16, bounds).trace(bounds[0] + width * data(2, torch.float32))
        assert {point.dtype for point in trace.iterates} == {torch.bfloat16}
        assert bool(torch.isfinite(trace.logits).all())


@pytest.mark.parametrize("name", [name for name in NAMED if "checkpoint" in declared(NAMED[name])])
def test_checkpoints_change_no_gradient(name):
    x, weights, found = data(4), torch.ones(4, 4, dtype=torch.float64), []
    for checkpoint in (False, True):
        defense = quick(name, checkpoint=checkpoint)
        with defense.seeded(5):
            found.append(gradient(defense, x, weights))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", TRAINED)
def test_training_depends_on_its_seed_alone(name):
    net, x, labels = network(torch.float32), data(20, torch.float32), torch.arange(20) % 4
    kept = [parameter.clone() for parameter in net.parameters()]
    quickly = {"epochs": 1, "batch_size": 8}
    quickly |= {"layers": ("5",), "attack_steps": 1} if name == "aid" else {}
    ways = [{**quickly, "seed": seed} for seed in (0, 0, 1)]
    if name == "clc":
        ways = [{"layers": layers} for layers in (("4",), ("4",), ("1",))]
    before = torch.get_rng_state()
    parts = [NAMED[name].training_class(**settings).fit(net, x, labels).state_dict() for settings in ways]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(parts[0][key], value) for key, value in parts[1].items())
    assert any(not value.equal(parts[0][key]) for key, value in parts[2].items() if value.is_floating_point())
    assert not any(value.requires_grad for value in parts[0].values())
    assert all(torch.equal(a, b) for a, b in zip(kept, net.parameters(), strict=True))
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    for settings, inputs in ((ways[0], x[:1]), (ways[0], 2 * x)):
        with pytest.raises(InvalidArgumentError, match="inputs: got"):
            NAMED[name].training_class(**settings).fit(net, inputs, labels[: len(inputs)])


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


def test_settings_and_bounds(net, images):
    made = named_defense("hd(steps=5, radius=2/255, random_start=False)", net, images[0], bounds=(-1, 1))
    assert (made.steps, made.random, made.bounds) == (5, False, (-1.0, 1.0))
    assert made.radius == pytest.approx(4 / 255)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("soap(view='{file}:view')", lambda made, x: torch.equal(made.view(x), 0.5 * x)),
        ("imf(discriminator='{file}:judge()')", lambda made, x: made.discriminator.in_features == 10),
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
