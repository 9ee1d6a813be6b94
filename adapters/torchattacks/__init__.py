"""Attacks of torchattacks. Importing this imports no torchattacks; using it does."""

from robust_ext.adapters.host import HostAdapter

ADAPTER = HostAdapter("torchattacks", title="torchattacks", install="--no-deps torchattacks")
