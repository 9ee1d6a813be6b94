"""Why an attack fails, and what to do: findings about models and attacks, each with its evidence and remedies."""
