"""Features and readout: a classifier as ``readout o features``, found by itself, named, or given as a pair."""

from robust_ext.models.features.observed import LayerInput as LayerInput
from robust_ext.models.features.observed import Observed as Observed
from robust_ext.models.features.observed import layer_names as layer_names
from robust_ext.models.features.splitting import split as split
from robust_ext.models.features.splitting import split_linear as split_linear
from robust_ext.models.features.tail import Split as Split
from robust_ext.models.features.tail import as_parts as as_parts
