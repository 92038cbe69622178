"""The command line: ``halfstep compare``, ``doctor`` and ``ops``."""

from halfstep.cli.app import app

__all__ = ["app"]
