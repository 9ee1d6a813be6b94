"""Train a network of the MEAD paper (Granese et al. 2022).

    python examples/train_mead.py --data mnist --data-root FOLDER --out mead_mnist.safetensors
    python examples/train_mead.py --data cifar10 --data-root FOLDER --device cuda --out mead_cifar10.safetensors

FOLDER holds the files of the data. The settings are the paper's: 100 epochs of SGD with momentum .9, at a learning rate
of .01 (MNIST), or of .1 with a weight decay of 1e-5 (CIFAR-10, ResNet-18). The paper gives neither a batch size (64 and
128 here) nor augmentation nor a schedule; ``--augment`` and ``--decay`` are those of TRADES for CIFAR-10, whose network
files the paper's code takes. An epoch of MNIST takes a minute on two cores; so does one of a ResNet-18 of an eighth of
the channels (``--width 8``). The state is written next to ``--out`` after each epoch, and the same command continues
from there.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor, nn

from robust_ext.cli.models import load_model
from robust_ext.core.files import replace_file
from robust_ext.core.random import derive_seed
from robust_ext.datasets import load_dataset

NETWORKS = Path(__file__).with_name("networks.py")


def augmented(inputs: Tensor) -> Tensor:
    """Return images ``(N, C, H, W)`` shifted by up to 4 pixels, zeros coming in, and half of them mirrored."""
    size, offsets = inputs.shape[-1], torch.randint(9, (len(inputs), 2))
    padded = nn.functional.pad(inputs, (4, 4, 4, 4))
    crops = [image[:, y : y + size, x : x + size] for image, (y, x) in zip(padded, offsets.tolist(), strict=True)]
    mirrored = (torch.rand(len(inputs)) < 0.5).view(-1, 1, 1, 1).to(inputs.device)
    stacked = torch.stack(crops)
    return torch.where(mirrored, stacked.flip(-1), stacked)


def store(file: Path, network: nn.Module, optimizer: torch.optim.SGD, about: dict[str, object]) -> None:
    """Write weights, momentum, settings and the number of epochs that are done."""
    momentum = {
        f"momentum.{name}": optimizer.state[value]["momentum_buffer"] for name, value in network.named_parameters()
    }
    tensors = {name: value.contiguous() for name, value in {**network.state_dict(), **momentum}.items()}
    replace_file(file, save(tensors, metadata={"training": json.dumps(about)}))


def restore(file: Path, network: nn.Module, optimizer: torch.optim.SGD, settings: dict[str, object]) -> int:
    """Load what :func:`store` wrote; return the number of epochs that are done, 0 without a file."""
    if not file.exists():
        return 0
    with safetensors.safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["training"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    done = int(about.pop("done"))
    if about != settings:
        raise SystemExit(f"{file} is of a training with other settings ({about}); delete it, or choose another --out")
    network.load_state_dict({name: value for name, value in tensors.items() if not name.startswith("momentum.")})
    for name, value in network.named_parameters():
        optimizer.state[value]["momentum_buffer"] = tensors[f"momentum.{name}"].to(value.device)
    return done


def parse() -> argparse.Namespace:
    """Return the options, with the paper's settings of the data where they are left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("mnist", "cifar10"), default="mnist")
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--out", type=Path, help="mead_mnist.safetensors or mead_cifar10.safetensors by default")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--images", type=int, help="training images; all by default")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution (cifar10)")
    parser.add_argument("--augment", action="store_true", help="shift by up to 4 pixels, mirror half of the images")
    parser.add_argument("--decay", action="store_true", help="divide the learning rate by 10 after 75 and 90 per cent")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args()
    found.out = found.out or Path(f"mead_{found.data}.safetensors")
    found.batch_size = found.batch_size or {"mnist": 64, "cifar10": 128}[found.data]
    return found


def main() -> None:
    """Train, save, and print the accuracy on the test images after every epoch."""
    asked = parse()
    data, test = (load_dataset(asked.data, root=asked.data_root, split=split) for split in ("train", "test"))
    inputs, labels = data.take(data.choose(asked.images or len(data), seed=asked.seed))
    test_inputs, test_labels = test.take(range(len(test)))
    torch.manual_seed(asked.seed)
    cifar = asked.data == "cifar10"
    network = load_model(f"{NETWORKS}:mead_{asked.data}" + f"(width={asked.width})" * cifar).model
    assert isinstance(network, nn.Module)
    network.to(asked.device)
    rate, weight_decay = (0.1, 1e-5) if cifar else (0.01, 0.0)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=weight_decay)
    settings = {key: value for key, value in vars(asked).items() if key not in ("out", "data_root", "device")}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    state = asked.out.with_suffix(".state.safetensors")
    for epoch in range(restore(state, network, optimizer, settings), asked.epochs):
        # What an epoch draws follows from its number, so that a resumed training is the same.
        torch.manual_seed(derive_seed(asked.seed, "epoch", epoch))
        passed = [epoch >= asked.epochs * share for share in (0.75, 0.9)]
        optimizer.param_groups[0]["lr"] = rate * 0.1 ** (sum(passed) * asked.decay)
        network.train()
        for rows in torch.randperm(len(inputs)).split(asked.batch_size):
            batch = (augmented(inputs[rows]) if asked.augment else inputs[rows]).to(asked.device)
            loss = nn.functional.cross_entropy(network(batch), labels[rows].to(asked.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        network.eval()
        with torch.no_grad():
            predicted = torch.cat([network(x.to(asked.device)).argmax(1).cpu() for x in test_inputs.split(500)])
        store(state, network, optimizer, {**settings, "done": epoch + 1})
        print(f"epoch {epoch + 1}: test accuracy {(predicted == test_labels).float().mean():.4f}", flush=True)
    replace_file(asked.out, save({name: value.contiguous() for name, value in network.state_dict().items()}))


if __name__ == "__main__":
    main()
