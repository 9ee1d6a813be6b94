"""Models by name: of timm and transformers with random weights, of torchvision, and of stand-ins for others."""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from robust_ext import DataError, InvalidArgumentError, ModelError, as_module
from robust_ext.models.wrapping import Normalized
from robust_ext.registry import adapters
from tests.libraries import library

VIT = "patch_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, image_size=32"
STATED = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TIMM_VIT = "timm:vit_tiny_patch16_224(img_size=32, patch_size=8, depth=1, embed_dim=24, num_heads=3, num_classes=10)"


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    """The hub is not reached for, wherever the tests run."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def image(shape=(3, 40, 40), seed=0):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def test_timm_s_normalisation_is_that_of_its_transform():
    """A whole image through timm's transform and network, and in [0, 1] through the module."""
    timm = library("timm")
    from PIL import Image

    adapted, pixels = as_module(TIMM_VIT), image((32, 32, 3))
    inner = adapted.module.module
    stated = {**timm.data.resolve_model_data_config(inner), "input_size": (3, 32, 32), "crop_pct": 1.0}
    with torch.no_grad():
        expected = inner(timm.data.create_transform(**stated)(Image.fromarray(pixels.numpy()))[None])
        got = adapted.module(pixels.permute(2, 0, 1)[None] / 255)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert (adapted.bounds, adapted.input_shape) == ((0.0, 1.0), (3, 32, 32))
    assert not adapted.module.training


@pytest.mark.parametrize("name", ["resnet18", "inception_v3"])
def test_torchvision_s_normalisation_is_that_of_its_weights(name):
    torchvision = library("torchvision")
    adapted = as_module(f"torchvision:{name}(num_classes=5)")
    preset = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    size = preset.crop_size[0]
    preset.resize_size = preset.crop_size
    assert adapted.input_shape == (3, size, size)
    x = image((2, *adapted.input_shape))
    shown = Normalized(nn.Identity(), mean=STATED[0], std=STATED[1])
    torch.testing.assert_close(shown(x / 255), preset(x))
    assert str(adapted.module).startswith(f"Normalized(\n  {shown.extra_repr()}")


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_normalisation_of_transformers_is_that_of_its_processor(every):
    """What a processor makes of an image, without its resizing, is what the network is given."""
    library("transformers")
    from robust_ext.adapters import hf

    # No images but tokens, patches or pages; no processor without a network, or none at all.
    others = ("imagegpt", "siglip2", "donut-swin", "perceiver", "timm_wrapper", "dinov2_with_registers", "hgnet_v2")
    kinds = [kind for kind in hf.ADAPTER.names() if kind not in others]
    assert len(kinds) >= 30
    x = image((3, 16, 16))
    for kind in kinds if every else ["mobilevit"]:
        processor = hf.default_processor(kind)
        mean, std, flipped = hf.normalisation(processor)
        got = Normalized(nn.Identity(), mean=mean, std=std)(x[None] / 255)[0]
        expected = processor(x, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(got.flip(0) if flipped else got, expected.float(), rtol=1e-5, atol=1e-5, msg=kind)


def test_types_and_folders_of_transformers_have_their_settings_weights_and_processors(tmp_path):
    transformers = library("transformers")
    adapted, x = as_module(f"hf:vit(num_labels=7, {VIT})"), image((2, 3, 32, 32)) / 255
    made = adapted.module.module.module
    with torch.no_grad():
        raw = made(pixel_values=(x - 0.5) / 0.5).logits
        torch.testing.assert_close(adapted.module(x), raw)
    assert (raw.shape, adapted.bounds, adapted.input_shape) == ((2, 7), (0.0, 1.0), (3, 32, 32))
    flipped = as_module("hf:mobilevit(num_labels=3, image_size=64)").module
    assert type(flipped.module).__name__ == "ReversedChannels"
    assert flipped(torch.rand(1, 3, 64, 64)).shape == (1, 3)
    made.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(as_module(f"hf:{tmp_path}").module(x), raw)
        transformers.ViTImageProcessor(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.6]).save_pretrained(tmp_path)
        shown = Normalized(made, mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])(x).logits
        torch.testing.assert_close(as_module(f"hf:{tmp_path}").module(x), shown, rtol=1e-4, atol=1e-5)
    made.vit.save_pretrained(tmp_path / "bare")
    with pytest.raises(DataError, match=r"no weights for classifier.bias and 1 others, which would be random"):
        as_module(f"hf:{tmp_path / 'bare'}(num_labels=7)")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("timm:resnet81", InvalidArgumentError, "did you mean resnet18"),
        ("timm:resnet10t(num_clases=3)", DataError, r"'num_clases'; check its settings"),
        ("timm:resnet18(checkpoint_path='net.pth')", InvalidArgumentError, "a state dict by --weights"),
        ("timm:resnet18(pretrained=True)", DataError, r"library's own cache, .* without pretrained=True they are rand"),
        ("torchvision:resnet18(weights='V7')", InvalidArgumentError, "one of IMAGENET1K_V1, DEFAULT"),
        ("hf:vit(num_layers=2)", InvalidArgumentError, "settings of ViTConfig; did you mean num_labels"),
        ("hf:vit(trust_remote_code=True)", InvalidArgumentError, "no code of the hub"),
        ("hf:no-one/nothing(local_files_only=True)", DataError, "a type, as in hf:vit"),
        *((f"hf:{name}", InvalidArgumentError, "a type of transformers") for name in ("\0", "a" * 5000, "~nobody")),
        ("hf:imagegpt(n_layer=1, n_embd=8, n_head=1)", ModelError, "takes input_ids, not images"),
    ],
)
def test_what_a_library_does_not_have_is_refused_with_what_to_do(text, error, message):
    for name in ("torchvision", "timm", "transformers"):
        library(name)
    with pytest.raises(error, match=message):
        as_module(text)


def stand_in(monkeypatch, name, **members):
    """A package of this name, with these members; in place of a real one as well."""
    for known in [known for known in sys.modules if known.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, known)
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
    for key, value in members.items():
        inner = ModuleType(f"{name}.{key}")
        vars(inner).update(value)
        monkeypatch.setitem(sys.modules, inner.__name__, inner)
        setattr(module, key, inner)


def test_a_stand_in_for_torchvision(monkeypatch):
    """What is called of torchvision where weights are wanted, which would be downloaded."""
    weights, calls = Enum("Weights", {"IMAGENET1K_V1": "v1"}), []
    weights.transforms = lambda self: SimpleNamespace(mean=[0.25], std=[0.5], crop_size=[8])

    def get_model(name, **settings):
        calls.append(settings["weights"])
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).eval()

    members = {"get_model": get_model, "list_models": lambda module: ["tiny"], "get_model_weights": lambda _: weights}
    stand_in(monkeypatch, "torchvision", models=members)
    with pytest.raises(InvalidArgumentError, match="one of IMAGENET1K_V1"):
        as_module("torchvision:tiny(pretrained=True)")
    adapted = as_module("torchvision:tiny(weights='Weights.IMAGENET1K_V1')")
    assert (calls, adapted.module.mean.tolist(), adapted.input_shape) == (["Weights.IMAGENET1K_V1"], [0.25], (3, 8, 8))


def test_a_stand_in_for_robustbench(monkeypatch):
    """With the parameters of RobustBench's own load_model, and its enumerations as keys."""
    dataset, threat = Enum("BenchmarkDataset", {"cifar_10": "cifar10"}), Enum("ThreatModel", {"Linf": "Linf"})
    calls = []

    def load_model(model_name, model_dir="./models", dataset="cifar10", threat_model="Linf", norm=None):
        calls.append((model_name, str(model_dir), dataset, threat_model))
        if model_name == "Absent":
            raise ConnectionError("no route")
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).eval()

    zoo = {dataset.cifar_10: {threat.Linf: dict.fromkeys(("Wang2023_WRN-70-16", "Absent"))}}
    stand_in(monkeypatch, "robustbench", utils={"load_model": load_model}, model_zoo={"model_dicts": zoo})
    adapted = as_module("robustbench:Wang2023_WRN-70-16(dataset='cifar10', threat_model='Linf', model_dir='/here')")
    assert calls == [("Wang2023_WRN-70-16", "/here", "cifar10", "Linf")]
    assert (adapted.bounds, adapted.input_shape) == ((0.0, 1.0), (3, 32, 32))
    assert adapters()["robustbench"].list_models() == ["Absent", "Wang2023_WRN-70-16"]
    for bad, message in (
        ("Wang2023", "did you mean Wang2023_WRN-70-16"),
        ("Absent(dataset='mnist')", "dataset: got 'mnist', expected one of 'cifar10'"),
        ("Absent(threat='Linf')", "did you mean threat_model"),
        ("Absent", "ConnectionError: no route; its weights have to be in model_dir"),
    ):
        with pytest.raises((InvalidArgumentError, DataError), match=message):
            as_module(f"robustbench:{bad}")
