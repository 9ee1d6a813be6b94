# %% [markdown]
# # The nearest adversarial example and a security curve
#
# Robust accuracy at one budget is one point of a curve. The whole curve follows from the distance between each input
# and its nearest adversarial example: at a budget epsilon, the inputs whose distance is larger are robust.
#
# Distances can only be overestimated, as an attack that finds a nearer example proves that one exists. So curves of
# attacks lie above the true one, and the lowest is the best known. Here two searches for the nearest example,
# `LinearRegion` and `BoundarySearch`, are compared with attacks in common use.

# %%
import foolbox
import matplotlib.pyplot as plt
import numpy as np
import torch

import robust_ext
from robust_ext.adapters.foolbox.attacks import L2LinearRegionAttack
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

network = digits_network()
inputs, labels = load_dataset("digits").take(range(32))
threat_model = robust_ext.ThreatModel(norm="l2", epsilon=0.6)
epsilons = [0.2, 0.4, 0.6, 0.8, 1.0]

# %% [markdown]
# ## One call for the curve
#
# Attacks that search for the smallest perturbation are run once for all budgets, the others once for each. Every
# candidate is verified, and what was found at a small budget counts at larger ones.

# %%
attacks = {
    "FGM": "foolbox:L2FastGradientAttack",
    "PGD": "foolbox:L2PGD(steps=20)",
    "APGD": "robust_ext:APGD(steps=20)",
    "DeepFool": "foolbox:L2DeepFoolAttack",
    "DDN": "foolbox:DDNAttack(steps=50)",
    "BoundarySearch": "robust_ext:BoundarySearch",
    "LinearRegion": "robust_ext:LinearRegion",
}
result = robust_ext.robust_accuracy(network, attacks, inputs, labels, threat_model, epsilons=epsilons)
print(result)

# %% [markdown]
# ## What a bad default looks like
#
# PGD is the best known attack of these, and its curve is the highest. The warning above the table gives the
# reason: Foolbox's default step is 0.025 epsilon, so 20 steps end half way to the sphere. A single large step, FGM,
# finds more.

# %%
middle = 0.6
left = {name: result.robust_accuracy(middle, attack=name) for name in attacks}
short = [one for one in result.content["findings"] if one["attack"].startswith("PGD")]
print(short[0]["cause"])
assert short[0]["code"] == "short_path"
assert left["PGD"] == max(left.values())
assert left["FGM"] < left["PGD"]

# %% [markdown]
# With steps that reach the sphere, the same attack is as good as APGD, give or take an input. (The text is what the
# finding proposes; it is printed with the result.)

# %%
print(short[0]["remedies"][0]["attack"])
fixed = robust_ext.robust_accuracy(
    network, {"PGD": short[0]["remedies"][0]["attack"]}, inputs, labels, threat_model, epsilons=epsilons
)
print(f"robust at {middle}: {left['PGD']:.2f}, and {fixed.robust_accuracy(middle):.2f} with larger steps")
assert fixed.robust_accuracy(middle) < left["PGD"] - 0.3
assert abs(fixed.robust_accuracy(middle) - left["APGD"]) < 0.1

# %% [markdown]
# ## Distances
#
# The searches for the nearest example state a distance for each input: 0 where the network errs without an attack.
# `LinearRegion` solves the problem exactly inside one linear region of the network after another; `BoundarySearch` is
# the same search without regions, for networks that are not piecewise linear. Both are, on average, nearer than
# DeepFool and DDN.

# %%
searches = ("DeepFool", "DDN", "BoundarySearch", "LinearRegion")
distances = {name: np.array(result.attacks[name]["distances"], dtype=float) for name in searches}
for name, found in distances.items():
    print(f"{name:14}  mean distance {found.mean():.4f}, median {np.median(found):.4f}")
nearest = np.minimum(distances["BoundarySearch"], distances["LinearRegion"])
assert nearest.mean() < min(distances["DeepFool"].mean(), distances["DDN"].mean())
assert abs(distances["BoundarySearch"].mean() - distances["LinearRegion"].mean()) < 0.01

# %% [markdown]
# A distance is a point of the curve: sorting them gives the curve at every budget, not only at those that were asked
# for.

# %%
for epsilon in epsilons:
    at_least = float((distances["LinearRegion"] > epsilon).mean())
    assert at_least == result.robust_accuracy(epsilon, attack="LinearRegion")

# %% [markdown]
# ## The images
#
# Every attack of the project is a class of Foolbox and of ART too. Without a budget, Foolbox returns the nearest
# example of each input.

# %%
first = (network(inputs).argmax(1) == labels).nonzero()[:6, 0]
model = foolbox.PyTorchModel(network, bounds=(0, 1))
_, found, success = L2LinearRegionAttack()(model, inputs[first], labels[first], epsilons=None)
norms = (found - inputs[first]).flatten(1).norm(dim=1)
with torch.no_grad():
    seen = network(found).argmax(1)
assert bool(success.all())
assert bool((seen != labels[first]).all())

# %% [markdown]
# ## The figure
#
# Above: security curves. Below: digits, and their nearest adversarial examples with what the network takes them for.

# %%
figure = plt.figure(figsize=(7.5, 7), layout="constrained")
above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
axes = above.subplots()
for name in ("PGD", "FGM", "DeepFool", "DDN"):
    axes.plot(epsilons, [result.robust_accuracy(one, attack=name) for one in epsilons], "o--", label=name, alpha=0.7)
steps = np.concatenate([[0], np.sort(distances["LinearRegion"])])
axes.step(steps, 1 - np.arange(len(steps)) / len(nearest), where="post", color="black", label="LinearRegion")
axes.set(xlabel="epsilon (l2)", ylabel="robust accuracy", ylim=(0, 1.02), xlim=(0, 1.05))
axes.legend(frameon=False)
panels = below.subplots(2, len(first))
for column, row in zip(panels.T, range(len(first)), strict=True):
    for panel, image in zip(column, (inputs[first[row]], found[row]), strict=True):
        panel.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
        panel.axis("off")
    column[0].set_title(f"{int(labels[first[row]])}")
    column[1].set_title(f"{int(seen[row])}, at {norms[row]:.2f}")

# %% [markdown]
# ## What to take along
#
# - Report a curve, and the lowest of several attacks: `result.robust_accuracy(epsilon)` is the worst case over all.
# - Read the warnings before the numbers.
# - A search for the nearest example needs one run for all budgets.
#
# More: [robust accuracy](../robust_accuracy.md), [the linear-region attack](../linear_region.md).
