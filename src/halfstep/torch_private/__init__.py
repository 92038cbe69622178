"""Every private name of torch that halfstep uses, once: private modules, names with an underscore, private attributes.

Other files import them from here, under names without an underscore. All exist in torch 2.11 to 2.13 unless a comment
beside one says otherwise; `tests/torch_private` resolves each on the installed torch and names those that are missing.
A name is bound when its file is imported, so a call costs what torch's own name costs. Files are topics; `compiler`
and `distributed` have functions for names whose import takes seconds or that some builds of torch lack.

Four attributes may be read anywhere, because every pickled module and every version of torch since 1.0 has them:
`_parameters`, `_buffers` and `_modules` of modules, and `_version` of tensors.
"""
