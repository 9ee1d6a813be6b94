"""An ART user: the classifier and an attack as they are, one more line for the verdict."""

import torch
from art.attacks.evasion import ProjectedGradientDescent
from art.estimators.classification import PyTorchClassifier

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

digits = load_dataset("digits")
inputs, _ = digits.take(digits.choose(64, seed=0))

classifier = PyTorchClassifier(
    digits_network(), loss=torch.nn.CrossEntropyLoss(), input_shape=(1, 8, 8), nb_classes=10, clip_values=(0, 1)
)
classifier.model.eval()
attack = ProjectedGradientDescent(classifier, eps=0.1, eps_step=0.01, max_iter=40, verbose=False)
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
print(robust_ext.binarization_test(classifier, attack, inputs, threat_model))
