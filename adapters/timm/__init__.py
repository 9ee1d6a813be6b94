"""Models of timm. Importing this imports no timm; using it does."""

from robust_ext.adapters.host import ModelAdapter

ADAPTER = ModelAdapter(name="timm", title="timm", package="timm", install='"robust-ext[models]"')
