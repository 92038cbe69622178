"""Pages and tables of the commands that train: `compare` and `demo`."""
