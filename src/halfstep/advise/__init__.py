"""Advice before and around a run: `tune` decides on a policy, `plan` counts memory ahead, `lint` finds mistakes.

They use the public names of the package, and tasks. `hs.tune`, `hs.plan` and `hs.lint` are their functions.
"""
