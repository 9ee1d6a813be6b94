"""Foolbox attacks and models. Importing this imports no Foolbox; using it does."""

from robust_ext.adapters.host import HostAdapter

ADAPTER = HostAdapter(name="foolbox", title="Foolbox", package="foolbox", install='"robust-ext[foolbox]"')
