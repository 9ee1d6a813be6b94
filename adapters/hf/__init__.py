"""Image classifiers of Hugging Face's transformers. Importing this imports no transformers; using it does."""

from robust_ext.adapters.host import ModelAdapter

ADAPTER = ModelAdapter(name="hf", title="transformers", package="transformers", install='"robust-ext[models]"')
