# %% [markdown]
# # From one machine to Dask
#
# An evaluation consists of blocks of samples that need nothing of each other, so it can run on as many machines as
# there are. This tutorial runs one in this process, runs the same call on a Dask cluster, compares the results bit by
# bit, and continues a run on other workers than it was begun on. The cluster has two workers on this machine; a real
# one differs by its address alone.

# %%
import tempfile

import matplotlib.pyplot as plt
import torch

import robust_ext
from robust_ext.datasets import load_dataset
from robust_ext.demo.network import digits_network

try:
    from distributed import Client, get_task_stream
    from distributed.deploy.subprocess import SubprocessCluster
except ImportError:
    raise SystemExit('This tutorial needs Dask: pip install "robust-ext[dask]"') from None

# %% [markdown]
# ## In this process
#
# Your own attack next to one of the project. Blocks have eight samples here, so that there are some to share.


# %%
def one_step(model, x, y, epsilon):
    """One step along the sign of the gradient."""
    x = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), y), x)
    return (x + epsilon * gradient.sign()).clamp(0, 1).detach()


network = digits_network()
inputs, labels = load_dataset("digits").take(range(64))
threat_model = robust_ext.ThreatModel(norm="linf", epsilon=0.1)
attacks = {"one step": one_step, "APGD": "robust_ext:APGD(steps=40)"}
given = (network, attacks, inputs, labels, threat_model)

here = robust_ext.robust_accuracy(*given, batch_size=8)
print(here)

# %% [markdown]
# ## A cluster
#
# On real machines: `dask scheduler` on one, `dask worker tcp://head:8786 --nthreads 1 --nworkers 8` on each, or
# `dask-jobqueue` and `dask-kubernetes`. Here both run as processes of this machine. Workers must have one thread, as
# seeds and hooks of attacks belong to a whole process.

# %%
cluster = SubprocessCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
client = Client(cluster)
client.wait_for_workers(2)
address = client.scheduler.address
print(f'executor="dask:{address}"')

# %% [markdown]
# ## The same call
#
# One keyword is new. The function `one_step` travels to the workers by itself; modules that it imports have to be
# installed there.

# %%
with get_task_stream(client=client) as stream:
    there = robust_ext.robust_accuracy(*given, batch_size=8, executor=f"dask:{address}")
workers = sorted({task["worker"] for task in stream.data})
print(f"{len(stream.data)} calls on {len(workers)} workers")
assert len(workers) == 2

# %% [markdown]
# Every random draw is a function of the seed and the sample, not of the order in which blocks are run. So the results
# are equal in everything but the times, and this is what `==` compares.

# %%
assert there == here
print(robust_ext.compare(here, there))

# %% [markdown]
# ## Continue elsewhere
#
# With `out=`, records are appended to a folder as blocks are finished. Only this process writes there, so the workers
# need no shared file system. A run that was killed continues by the same call, and so does one that is given more to
# do. Below, the first call runs one attack in this process, the second adds the other on the cluster: it computes only
# what is missing.

# %%
with tempfile.TemporaryDirectory() as folder:
    first = {"one step": one_step}
    robust_ext.robust_accuracy(network, first, inputs, labels, threat_model, batch_size=8, out=folder)
    with get_task_stream(client=client) as rest:
        both = robust_ext.robust_accuracy(*given, batch_size=8, executor=f"dask:{address}", out=folder)
print(f"{len(rest.data)} calls instead of {len(stream.data)}")
assert len(rest.data) < len(stream.data)
assert both.robust_accuracy(0.1) == here.robust_accuracy(0.1)

# %% [markdown]
# ## The figure
#
# When each worker computed what. The first calls are short: they bring the network.

# %%
figure, axes = plt.subplots(figsize=(8, 2.4), layout="constrained")
spans = [(task["worker"], span) for task in stream.data for span in task["startstops"] if span["action"] == "compute"]
begin = min(span["start"] for _, span in spans)
for worker, span in spans:
    start, length = span["start"] - begin, span["stop"] - span["start"]
    axes.barh(workers.index(worker), length, left=start, color="#3b6ea5", edgecolor="white", linewidth=0.8)
axes.set(yticks=range(2), yticklabels=["worker 1", "worker 2"], xlabel="seconds", title="Blocks on two workers")
client.close()
cluster.close()

# %% [markdown]
# ## What to take along
#
# - `executor="local:4"` for processes of one machine, `"dask:ADDRESS"` or any `concurrent.futures.Executor` for
#   clusters; results are the same.
# - A block takes seconds, a call milliseconds: clusters pay off where attacks take minutes.
# - Keep a run folder. Then a machine that is lost costs a block.
#
# More: [clusters](../clusters.md), [large inputs](../scaling.md).
