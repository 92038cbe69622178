"""Other libraries' names over halfstep's core, for code that is written already. The core imports nothing of it."""
