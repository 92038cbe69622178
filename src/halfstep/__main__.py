"""``python -m halfstep``: the command line."""

from halfstep.cli import app

if __name__ == "__main__":
    app(prog_name="halfstep")
