"""Regions: how they are opened and closed, recomputed in, and what is said of torch's dtype errors there."""
