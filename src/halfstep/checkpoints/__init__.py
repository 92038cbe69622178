"""Checkpoints: a training step on disk, in folders of files with checksums; public names."""

from halfstep.checkpoints.preemption import on_preemption
from halfstep.checkpoints.save import Loaded, Saving, load, save

__all__ = ["Loaded", "Saving", "load", "on_preemption", "save"]
