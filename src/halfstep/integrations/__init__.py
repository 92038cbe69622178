"""Integrations: a policy in the training loops of other libraries.

A module for each library, with its name: `transformers`, `accelerate`, `lightning`, and so on. The loop stays the
library's; a module here prepares model and optimizer at the right moment, and connects loss scale, skipped steps and
black box. A module is imported when it is first used; without its library that is an `IntegrationError`.
"""

from typing import TYPE_CHECKING

from halfstep.lazy import lazy

if TYPE_CHECKING:
    from halfstep.integrations import accelerate as accelerate
    from halfstep.integrations import lightning as lightning
    from halfstep.integrations import loggers as loggers
    from halfstep.integrations import timm as timm
    from halfstep.integrations import transformers as transformers

__all__ = ["accelerate", "lightning", "loggers", "timm", "transformers"]

__getattr__ = lazy(__name__, {})
