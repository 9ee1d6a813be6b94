"""What everything else builds on: threat models, targets, randomness, settings, checks and errors."""
