"""The command line: ``halfstep compare``."""

from halfstep.cli.app import app

__all__ = ["app"]
