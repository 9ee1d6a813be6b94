"""What detectors compute of inputs, logits and layers."""
