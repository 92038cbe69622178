"""The update: gradients of a window become new weights."""
