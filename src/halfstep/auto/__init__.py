"""What policy=\"auto\" chooses: candidates race on the model and the batch of a training step."""
