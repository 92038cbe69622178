"""The folder that `halfstep run --policy` puts on the path of processes that a script starts."""
