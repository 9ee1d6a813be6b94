"""How attacks are run over samples, verified, stored and resumed; shared by every evaluation."""
