"""Plan: count the bytes of a training step before training, and without its memory."""
