"""``python -m halfstep``: the command line."""

from halfstep.cli import main

if __name__ == "__main__":
    main()
