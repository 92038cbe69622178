"""The black box: which operator made a step not finite, and under which policy it would have been."""
