"""Datasets: labelled images by a name or from a path, of which inputs are taken in the bounds of a model.

scikit-learn and Pillow are imported when the digits or a folder of images are loaded, not when this package is.
"""

from __future__ import annotations

from robust_ext.datasets.base import Dataset
from robust_ext.datasets.load import load_dataset

__all__ = ["Dataset", "load_dataset"]
