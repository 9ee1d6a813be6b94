# %% [markdown]
# # Several detectors against many attacks
#
# Papers on detectors compare them under one attack at a time, and rank them by the average. An attacker does not
# average. It takes the attack that the detector misses, and may choose another one for each input.
# MEAD (Granese et al. 2022) evaluates that: an input counts as detected only if *every* successful attack on it is.
#
# ## Four detectors
#
# All four are published, and fitted on training data by their names: feature squeezing, kernel density (KD-BU), local
# intrinsic dimensionality (LID) and natural scene statistics (NSS). The last three also learn from adversarial examples
# of PGD.

# %%
import matplotlib.pyplot as plt
import numpy as np

import robust_ext
from robust_ext import fit_detector
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

train, test = load_dataset("digits", split="train"), load_dataset("digits")
network = digits_network()
detectors = {name: fit_detector(name, network, *train.take(range(600))) for name in ("fs", "kd-bu", "lid", "nss")}
rows = test.choose(264, seed=0)
inputs, labels = test.take(rows[:64])
calibration, _ = test.take(rows[64:])

# %% [markdown]
# ## Seven attacks of one budget
#
# Gradient ascent on three objectives (cross-entropy, the Kullback-Leibler divergence from the clean prediction, Gini
# impurity), a single step, the difference of logits, random squares, and one of Foolbox. Attacks of one norm and budget
# form a group, which is judged together. The detectors do not see who made a candidate, and no attack sees a detector.

# %%
PGD = "robust_ext:ObjectivePGD(steps=20, rel_step_size=0.1, objective='{}')"
attacks = {
    "cross-entropy": PGD.format("ace"),
    "KL": PGD.format("kl"),
    "Gini": PGD.format("gini"),
    "one step": "robust_ext:ObjectivePGD(algorithm='fgsm')",
    "margin": "robust_ext:APGD(steps=20, loss='margin')",
    "squares": "robust_ext:Square(queries=200)",
    "DeepFool": "foolbox:LinfDeepFoolAttack",
}
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.2)
arms = [robust_ext.Arm(attack=attack, epsilon=0.2, label=name) for name, attack in attacks.items()]
result = robust_ext.mead(
    network, arms, inputs, labels, threat_model, detectors=detectors, detector_data=calibration, combine=("mean",)
)
print(result)

# %% [markdown]
# ## One attack at a time
#
# The AUROC of each detector under each attack by itself, and under all of them together. The last row is one more
# detector, made of the four: the mean of their ranks among clean inputs.

# %%
entries = result.detectors
single = np.array([[arm["auroc"] for arm in entry["arms"]] for entry in entries.values()])
together = np.array([result.auroc(name) for name in entries])
columns = [*attacks, "all together"]
rows = [*detectors, "mean of four"]
print(f"{'':14}" + "".join(f"{name:>14}" for name in columns))
for name, numbers, worst in zip(rows, single, together, strict=True):
    print(f"{name:14}" + "".join(f"{one:14.2f}" for one in (*numbers, worst)))

# %% [markdown]
# For every detector the last column is below all others, the *strongest* single attack included, since for different
# inputs different attacks slip by.

# %%
assert (together < single.min(1) - 0.02).all()

# %% [markdown]
# LID is better than guessing under each attack, and worse than guessing under all of them. Whoever evaluates one attack
# at a time cannot see that.

# %%
lid = rows.index("lid")
assert single[lid].min() > 0.5
assert together[lid] < 0.5

# %% [markdown]
# The single numbers are also not about the same inputs. An attack is judged by the inputs on which it succeeds, and
# some succeed on few: *coverage* is that share. All together succeed on at least as many as each.

# %%
coverage = {name: arm["coverage"] for name, arm in zip(attacks, entries["nss"]["arms"], strict=True)}
everything = entries["nss"]["results"][0]["coverage"]
print({name: round(share, 2) for name, share in coverage.items()}, f"together {everything:.2f}")
assert everything >= max(coverage.values())

# %% [markdown]
# And the mean of the four is no better than the best of them. Against attackers who choose, weak members cost as much
# as strong ones bring.

# %%
print(f"mean of four {together[-1]:.2f}, NSS alone {together[rows.index('nss')]:.2f}")
assert together[-1] < together[rows.index("nss")] + 0.05

# %% [markdown]
# ## The figure
#
# The last column is the one to report.

# %%
figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
shown = np.column_stack([single, together])
image = axes.imshow(shown, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
for (row, column), value in np.ndenumerate(shown):
    axes.text(column, row, f"{value:.2f}", ha="center", va="center")
axes.axvline(len(attacks) - 0.5, color="white", linewidth=6)
axes.set(yticks=range(len(rows)), yticklabels=rows, xticks=range(len(columns)))
axes.set_xticklabels(columns, rotation=30, ha="right")
figure.colorbar(image, label="AUROC")

# %% [markdown]
# ## What to take along
#
# - Report detectors by the worst case over attacks, for each input, not by averages over attacks.
# - No attack here knew a detector. [Tutorial 2](02_detector.py) has some that do; the suite `"white-box"` adds them to
#   any list.
# - `robust_ext.mead(model, "quick", ...)` runs a suite by its name; `"paper-mnist"` and `"paper-cifar10"` are the
#   paper's.
#
# More: [MEAD](../mead.md), [its theory](../theory/mead.md).
