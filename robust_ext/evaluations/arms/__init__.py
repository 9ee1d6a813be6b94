"""Arms: attacks with budgets, each run once, verified, kept and scored; what evaluations over many attacks share."""
