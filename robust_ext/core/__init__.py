"""The foundation of all other packages: threat models, targets, randomness, settings, checks and errors."""
