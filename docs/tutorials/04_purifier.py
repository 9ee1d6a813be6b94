# %% [markdown]
# # A purifier at test time
#
# A purifier changes inputs before they are classified, to wash perturbations out. It is cheap to publish and hard to
# evaluate: its gradients are often of no use, which looks like robustness. This tutorial evaluates one of a few lines,
# following Croce et al. (2022): the question is not how robust the defended network is, but whether it is more robust
# than the network alone.
#
# ## The purifier
#
# It moves each image a quarter of the way to its median-filtered copy, and rounds to eight levels.

# %%
import matplotlib.pyplot as plt
import torch

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network


def purify(images):
    """Images (N, 1, H, W) in [0, 1], smoothed and rounded."""
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1), mode="reflect")
    medians = padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(4).median(-1).values
    return ((0.75 * images + 0.25 * medians) * 8).round() / 8


network = digits_network()
inputs, labels = load_dataset("digits").take(range(48))
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)

# %% [markdown]
# ## Every attack on every sample
#
# `evaluate_defense` takes a function from images to images and the network behind it. With `full=True` each recommended
# attack runs on all samples, so that they can be compared. Black-box attacks are left for later.

# %%
settings = {"classifier": network, "steps": 20, "queries": 100}
full = robust_ext.evaluate_defense(
    purify, None, inputs, labels, threat_model, full=True, skip=("black-box",), **settings
)
print(full)

# %% [markdown]
# The columns are robust accuracy of the network alone (*static*) and with the purifier (*defended*). Three things to
# see:
#
# 1. **Plain gradients.** PGD and APGD through the purifier as it is leave nearly everything. Rounding has a gradient of
#    exactly zero, as the warning below the table reports.
# 2. **Transfer.** Attacks on the network alone, whose points are then purified, leave far less. Most points survive the
#    purifier.
# 3. **BPDA** (Athalye et al. 2018). Forward through the purifier, backward as if it were the identity, which it nearly
#    is. This leaves least.

# %%
rows = {row["attack"]: row for row in full.rows()}
plain = min(row["defended"] for name, row in rows.items() if "plain gradients" in name)
transfer = min(row["defended"] for name, row in rows.items() if row["category"] == "transfer")
bpda = min(row["defended"] for name, row in rows.items() if "BPDA" in name)
print(f"plain gradients {plain:.2f}, transfer {transfer:.2f}, BPDA {bpda:.2f}")
assert plain > 0.8
assert transfer < plain - 0.3
assert bpda < transfer
assert any("gradient" in warning and "zero" in warning for warning in full.content["warnings"])

# %% [markdown]
# ## The gain
#
# What counts is the worst case over all attacks, of the defense and of the network alone. Here the purifier *loses*,
# and the interval of the difference, from a bootstrap over samples, is wholly below zero.

# %%
gain = full.defended - full.static
print(f"static {full.static:.2f}, defended {full.defended:.2f}, gain {gain:+.2f}")
print("95% interval of the gain:", [round(end, 2) for end in full.content["gain"]["interval"]])
assert gain < 0
assert full.content["gain"]["interval"][1] < 0

# %% [markdown]
# ## The cascade
#
# In a real evaluation, costly attacks need not run on samples that a cheap one has already broken. Without `full`, each
# attack runs on what those before it left, the most promising first, black-box attacks included. The worst case is
# about the same, for fewer passes through the network, though Square and RayS are in it now.

# %%
cascade = robust_ext.evaluate_defense(purify, None, inputs, labels, threat_model, **settings)
print(cascade)


def passes(result):
    """Rows sent forward and backward, in thousands."""
    return sum((row["forward"] or 0) + (row["backward"] or 0) for row in result.rows()) / 1000


print(f"{passes(full):.0f} and {passes(cascade):.0f} thousand passes")
assert passes(cascade) < passes(full)
assert cascade.defended <= full.defended + 0.05

# %% [markdown]
# ## Can the attack be trusted?
#
# The [binarization test](../binarization.md) takes a defense as well: examples are planted behind the purifier. The
# attack through BPDA finds them, the same attack through plain gradients does not.

# %%
defense = robust_ext.as_defense(purify, network, inputs, bounds=(0, 1))
APGD = robust_ext.as_attack("robust_ext:APGD(steps=20, loss='margin')")
verdicts = {}
for name, mode in (("plain gradients", "plain"), ("BPDA", "identity")):
    attack = robust_ext.AdaptedAttack(attack=APGD, gradient_mode=mode)
    test = robust_ext.binarization_test(defense, {name: attack}, inputs, threat_model, sequential=True, depths=(1,))
    verdicts[name] = test.verdict
    print(test)
assert verdicts == {"plain gradients": "failed", "BPDA": "passed"}

# %% [markdown]
# ## The figure

# %%
kinds = {"naive": "#b3422f", "transfer": "#d9a441", "white-box": "#3b6ea5", "all": "black"}
shown = sorted((row for row in full.rows() if row["category"] in kinds), key=lambda row: -row["defended"])
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for place, row in enumerate(shown):
    axes.barh(place, row["defended"], color=kinds[row["category"]])
    axes.annotate(
        f"{row['defended']:.0%}", (row["defended"], place), xytext=(3, 0), textcoords="offset points", va="center"
    )
axes.axvline(full.static, color="grey", linestyle="--", label="the network alone, worst case")
axes.set(yticks=range(len(shown)), yticklabels=[row["attack"] for row in shown], xlim=(0, 1.05))
axes.set(xlabel="robust accuracy of the defense", title=f"Which attack one reports, linf {threat_model.epsilon}")
axes.invert_yaxis()
axes.legend(frameon=False, loc="lower right")

# %% [markdown]
# ## What to take along
#
# - Compare with the network alone, under the same attacks.
# - Transfer first: it is cheap, needs no gradient through the defense, and breaks much.
# - A defense that is robust under its own gradients alone has not been evaluated.
#
# More: [adaptive defenses](../adaptive_defenses.md), nine published ones among them.
