"""Lens: sees what precision does to a training run: sketches, an audit, a monitor, a black box."""
