"""What is in the tensors of a run, and what is wrong with it."""

from halfstep.lens.monitor import Finding, Monitor
from halfstep.lens.records import ActivationRecord, MonitorRecord, ParameterRecord
from halfstep.lens.sketch import ExponentSketch, Sketches
from halfstep.lens.tensorboard import SketchWriter

__all__ = [
    "ActivationRecord",
    "ExponentSketch",
    "Finding",
    "Monitor",
    "MonitorRecord",
    "ParameterRecord",
    "SketchWriter",
    "Sketches",
]
