"""A Foolbox user: from a PyTorchModel to any Foolbox attack on planted adversarial examples, in five lines."""

import foolbox

from robust_ext.adapters.foolbox.models import BinarizedPyTorchModel
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

digits = load_dataset("digits")
inputs, _ = digits.take(digits.choose(32, seed=0))

model = foolbox.PyTorchModel(digits_network(), bounds=(0, 1), device="cpu")
binarized = BinarizedPyTorchModel.from_model(model, inputs, epsilon=0.1)
attack = foolbox.attacks.LinfPGD(steps=40)
_, candidates, success = attack(binarized, binarized.inputs, binarized.labels, epsilons=0.1)
print(f"test score {binarized.score(candidates):.2f}: the share of planted adversarial examples that were found")
