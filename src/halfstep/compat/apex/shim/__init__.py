"""The folder that `halfstep run` puts on the path, for processes that a script starts: `import apex` finds it there."""
