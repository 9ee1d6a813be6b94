"""ART-style estimators and Foolbox models of the modules in ``robust_ext.models``."""
