"""Lens: what is in the numbers of a run, what is wrong with them, and why a step went wrong."""
