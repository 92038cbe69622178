"""What a process started by a script under `halfstep run` imports as `apex`: it puts halfstep's in its own place."""

if __name__ == "apex":
    import sys

    from halfstep.compat.apex import install

    del sys.modules["apex"]
    install(force=True)
