"""Parts of a training step: each keeps one thing consistent through a window of micro-batches."""
