"""The command line, ``halfstep``: `app` lists its commands."""

from halfstep.cli.app import app

__all__ = ["app"]
