"""Arithmetic of formats that the device does not compute in: emulated, simulated, rounded once."""
