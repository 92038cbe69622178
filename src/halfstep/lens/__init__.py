"""What is in the tensors of a run, and what is wrong with it."""
