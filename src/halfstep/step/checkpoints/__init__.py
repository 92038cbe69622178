"""Checkpoints on disk: folders of files with checksums, shards, generators, conversion, and the end of a run by signal.

`halfstep.step.save` combines them into `hs.save` and `hs.load`.
"""
