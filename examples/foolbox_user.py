"""A Foolbox user: the model and the attacks as they are, one more line for the verdict."""

import foolbox

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

digits = load_dataset("digits")
inputs, _ = digits.take(digits.choose(64, seed=0))

model = foolbox.PyTorchModel(digits_network(), bounds=(0, 1), device="cpu")
attacks = {"PGD": foolbox.attacks.LinfPGD(steps=40), "FGSM": foolbox.attacks.FGSM(random_start=False)}
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
print(robust_ext.binarization_test(model, attacks, inputs, threat_model))
