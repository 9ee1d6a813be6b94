"""An attack written by hand, on any torch classifier: is it strong enough for its robustness claim?"""

import torch

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network


def fgsm(model, x, y, *, epsilon):
    """One step along the sign of the gradient."""
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), x)
    return (x + epsilon * gradient.sign()).clamp(0, 1).detach()


if __name__ == "__main__":
    digits = load_dataset("digits")
    inputs, _ = digits.take(digits.choose(64, seed=0))
    threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
    print(robust_ext.binarization_test(digits_network(), fgsm, inputs, threat_model))
