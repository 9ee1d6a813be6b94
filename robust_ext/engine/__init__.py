"""The engine of every evaluation: runs attacks over samples, verifies, stores and resumes."""
