"""Layers with MindSpore's arguments and defaults. Each is torch's layer too: its weights have torch's names."""

from halfstep.compat.mindspore.nn.layers import basic, normalization, windows
from halfstep.compat.mindspore.nn.layers.basic import *  # noqa: F403  # each file lists its layers
from halfstep.compat.mindspore.nn.layers.normalization import *  # noqa: F403
from halfstep.compat.mindspore.nn.layers.windows import *  # noqa: F403

__all__: list[str] = []
__all__ += basic.__all__
__all__ += normalization.__all__
__all__ += windows.__all__
