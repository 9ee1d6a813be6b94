"""Why an attack fails: probes of the model, rules on what an attack left, findings with evidence and remedies."""
