"""Computations of detectors on inputs, logits and layers."""
