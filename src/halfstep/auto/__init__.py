"""The choice of a policy by measuring: candidates race on the model and the batch of a training step."""
