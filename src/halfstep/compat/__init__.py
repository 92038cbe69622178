"""Other libraries' names over halfstep's core, for code that is written already. Nothing here is imported by the core."""
