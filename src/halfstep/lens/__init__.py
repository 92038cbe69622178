"""Lens: what is in the tensors of a run, and why a step went wrong."""
