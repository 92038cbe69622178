"""One traced training step of a task: what its operators and weights did, and the rules that read it."""
