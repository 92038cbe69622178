"""Stories of training loops and of loss scales."""
