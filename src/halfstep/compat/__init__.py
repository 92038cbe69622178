"""Compat: thin skins over halfstep that speak the words of other mixed-precision libraries."""
