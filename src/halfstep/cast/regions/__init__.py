"""Regions: how they are opened, closed and recomputed in, and explanations of torch's dtype errors there."""
