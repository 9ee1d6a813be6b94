"""Two-class readouts of the binarization test: how planted points are separated from inner ones, one file each."""

from robust_ext.models.readouts.base import Readout as Readout
from robust_ext.models.readouts.linear import fit_directions as fit_directions
