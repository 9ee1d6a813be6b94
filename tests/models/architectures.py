"""Architectures, and how each is split: the table of docs/evidence/architectures.md, which the tests run.

python -m tests.models.architectures    (writes the table)
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tests.libraries import library
from tests.models.cases import Net

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "architectures.md"
X = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
BEGIN, END = "<!-- architectures -->", "<!-- end of architectures -->"
WAYS = {
    "linear": "linear layer",
    "replayed": "run again",
    "beside": "averages and logits",
    "logits": "the logits are the features",
}


@dataclass(frozen=True)
class Architecture:
    """A model and what splitting it finds."""

    name: str
    head: str  # In words.
    make: Callable[[], object]
    layer: str = ""  # Expected; "" where the features enter no layer.
    features: int = 0  # Their number.
    kind: str = "linear"  # Of the split.
    size: int = 32  # Of the images.
    gradient: bool = True  # Whether the model passes gradients on.
    quick: bool = False  # Whether it is among the ordinary tests.


def pooled(maps):
    return maps.mean((2, 3))


def plain(net, maps):
    return net.fc(pooled(maps))


def small(head=plain, seed=0):
    """Four layers, and a head that is a function of them and what they return."""
    torch.manual_seed(seed)
    body = nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3, 2)
    heads = {"fc": nn.Linear(32, 10), "other": nn.Linear(32, 10), "conv": nn.Conv2d(32, 10, 1)}
    net = Net(lambda net, x: head(net, F.relu(net.body(x), inplace=True)), body=nn.Sequential(*body), **heads)
    net.register_buffer("bank", torch.randn(10, 32))
    return net


def sequential():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 10)).eval()


def exported():
    shapes = ({0: torch.export.Dim("rows", min=1, max=1024)},)
    return torch.export.export(sequential(), (torch.rand(2, 3, 32, 32),), dynamic_shapes=shapes)


def quantised():
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(sequential()), {nn.Linear}, dtype=torch.qint8)


def around(run, *networks):
    return Net(lambda net, x: run(net.networks, x), networks=nn.ModuleList(networks))


@torch.autocast("cpu", torch.bfloat16)
def in_autocast(networks, x):
    return networks[0](x)


def mean(networks, x):
    return torch.stack([part(x) for part in networks]).mean(0)


def lively(network):
    """The network in eval mode, with the statistics of noise in its batch normalisations: else signals die out."""
    norms = [part for part in network.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.momentum = None
            norm.reset_running_stats()
        with torch.no_grad():
            network.train()(torch.rand(16, 3, 64, 64))
    return network.eval()


def tv(name, **settings):
    torch.manual_seed(0)
    return lively(library("torchvision").models.get_model(name, weights=None, num_classes=10, **settings))


def tm(name, **settings):
    library("torchvision")
    torch.manual_seed(0)
    return lively(library("timm").create_model(name, num_classes=10, **settings))


def hf(name, head="", **settings):
    torch.manual_seed(0)
    transformers = library("transformers")
    config = getattr(transformers, f"{name}Config")(num_labels=10, **settings)
    return lively(getattr(transformers, f"{name}ForImageClassification{head}")(config))


TOKENS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
TOKENS |= {"intermediate_size": 64}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4}
CONV_HEAD = "1x1 convolution, ReLU, pooling"
ROWS = "row by row, without gradients"


def _linear(name, make, layer, features, **options):
    return Architecture(name, "linear", make, layer, features, **options)


def _replayed(name, head, make, layer="", features=32, **options):
    return Architecture(name, head, make, layer, features, **{"kind": "replayed", **options})


def _small(name, head, function, layer="", features=32, **options):
    return _replayed(name, head, lambda: small(function), layer, features, **options)


TWO, TEACHER = "mean of two linear", "WithTeacher"
BOTH = "cls_classifier,distillation_classifier"
LEVIT = "head.linear,head_dist.linear"
DEIT, NORMED = "deit_tiny_distilled_patch16_224", f"{TWO}, each after batch normalisation"
THREE, HEADS = [small(seed=seed) for seed in range(3)], "networks.0.fc,networks.1.fc,networks.2.fc"
BESIDE = {"kind": "beside", "size": 96}
RESNET = {"embedding_size": 16, "hidden_sizes": (16, 32), "depths": (1, 1)}
ARCHITECTURES = [
    _linear("torchvision resnet18", lambda: tv("resnet18"), "fc", 512, size=64),
    _linear("torchvision mobilenet_v3_small", lambda: tv("mobilenet_v3_small"), "classifier.3", 1024),
    _linear("torchvision efficientnet_b0", lambda: tv("efficientnet_b0"), "classifier.1", 1280),
    _linear("torchvision regnet_y_400mf", lambda: tv("regnet_y_400mf"), "fc", 440, size=64),
    _replayed("torchvision squeezenet1_1, 32 px", CONV_HEAD, lambda: tv("squeezenet1_1"), "classifier.1", 512),
    _replayed(
        "torchvision squeezenet1_1, 96 px", CONV_HEAD, lambda: tv("squeezenet1_1"), "classifier.1", 522, **BESIDE
    ),
    _linear("timm vit_tiny_patch16_224", lambda: tm("vit_tiny_patch16_224", img_size=64), "head", 192, size=64),
    _replayed(f"timm {DEIT}", TWO, lambda: tm(DEIT, img_size=64), "head,head_dist", 384, size=64),
    _replayed("timm levit_128s", NORMED, lambda: tm("levit_128s", img_size=64), LEVIT, 768, size=64),
    _replayed("timm resnetv2_18", "1x1 convolution", lambda: tm("resnetv2_18"), "head.fc", 512, size=64),
    _linear("timm convnext_atto", lambda: tm("convnext_atto"), "head.fc", 320, size=64),
    _linear("timm mobilenetv4_conv_small", lambda: tm("mobilenetv4_conv_small"), "classifier", 1280, size=64),
    _linear("timm edgenext_xx_small", lambda: tm("edgenext_xx_small"), "head.fc", 168, size=64),
    _linear("transformers ViT", lambda: hf("ViT", **TOKENS), "classifier", 32),
    _replayed("transformers DeiT with teacher", TWO, lambda: hf("DeiT", TEACHER, **TOKENS), BOTH, 64),
    _linear("transformers Swin", lambda: hf("Swin", **SWIN), "classifier", 32),
    _linear("transformers Dinov2", lambda: hf("Dinov2", **TOKENS), "classifier", 64),
    _linear("transformers ResNet", lambda: hf("ResNet", **RESNET), "classifier.1", 32),
    Architecture("torch.jit.script", "not seen", lambda: torch.jit.script(sequential()), "", 10, "logits", quick=True),
    Architecture("torch.jit.trace", "not seen", lambda: torch.jit.trace(sequential(), X[:1]), "", 10, "logits"),
    _linear("torch.compile", lambda: torch.compile(sequential()), "5", 64),
    _replayed("torch.export", "linear", exported, "", 64),
    Architecture("dynamic int8", f"quantised linear, {ROWS}", quantised, "", 10, "logits", gradient=False),
    _linear("half", lambda: small().half(), "fc", 32),
    _linear("bfloat16", lambda: small().bfloat16(), "fc", 32),
    _linear("double", lambda: small().double(), "fc", 32),
    _linear("autocast", lambda: around(in_autocast, small()), "networks.0.fc", 32),
    _replayed("mean of three networks", "three linear", lambda: around(mean, *THREE), HEADS, 96, quick=True),
    _small("temperature", "linear, divided", lambda net, x: net.fc(pooled(x)) / 2.5, "fc"),
    _small("log-softmax", "linear, log-softmax", lambda net, x: net.fc(pooled(x)).log_softmax(1), "fc"),
    _small("functional", "F.linear", lambda net, x: F.linear(pooled(x), net.fc.weight, net.fc.bias)),
    _small("cosine", "cosine, scaled", lambda net, x: 16 * unit(pooled(x)) @ unit(net.fc.weight).T, quick=True),
    _small("nearest neighbours", "minus distances", lambda net, x: -torch.cdist(pooled(x), net.bank)),
    _small("prototypes", "minus distances", lambda net, x: -(pooled(x)[:, None] - net.bank).square().sum(2)),
    _small("convolution, pooled", "1x1 convolution, pooling", lambda net, x: pooled(net.conv(x)), "conv"),
    _small("convolution, ReLU, pooled", CONV_HEAD, lambda net, x: pooled(net.conv(x).relu()), "conv", 1568),
]


def unit(rows):
    return F.normalize(rows, dim=1)


def table():
    """The table of the page, as lines."""
    lines = ["| model | its head | features | how the logits follow |", "|---|---|---|---|"]
    for one in ARCHITECTURES:
        where = f"{one.features}, into {', '.join(f'`{name}`' for name in one.layer.split(','))}"
        features = where if one.layer else f"{one.features}"
        lines.append(f"| {one.name} | {one.head} | {features} | {WAYS[one.kind]} |")
    return "\n".join(lines)


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
