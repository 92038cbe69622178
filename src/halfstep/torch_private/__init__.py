"""Every private name of torch that halfstep uses, once: private modules, names with an underscore, private attributes.

Other files import them from here, under names without an underscore. Names that a
supported version of torch may lack have a fallback; `tests/torch_private` resolves the others on the installed torch.
A name is bound when its file is imported, so a call costs what torch's own name costs. Files are topics; `compiler`
and `distributed` have functions for names whose import takes seconds or that some builds of torch lack.

Four attributes may be read anywhere, because every pickled module and every version of torch since 1.0 has them:
`_parameters`, `_buffers` and `_modules` of modules, and `_version` of tensors.
"""
