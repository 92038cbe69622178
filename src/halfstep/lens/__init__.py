"""Lens: why a step went wrong, and what its numbers look like."""
