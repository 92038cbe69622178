"""Static rules: what a script's syntax tree shows without running it."""
