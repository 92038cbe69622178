"""Low copies of fp32 weights: for the length of a region, and from step to step."""
