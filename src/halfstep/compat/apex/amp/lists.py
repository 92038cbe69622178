"""The operators that Apex's O1 patches, by module and by list: `lists.toml`.

What is done with them is halfstep's operator table ``apex-o1``; the tests hold the two to each other.
"""

from types import SimpleNamespace

from halfstep.schema import packaged_toml

functional_overrides, torch_overrides, tensor_overrides = (
    SimpleNamespace(**lists) for lists in packaged_toml("compat/apex/amp/lists.toml").values()
)
functional_overrides.BANNED_FUNCS = list(map(tuple, functional_overrides.BANNED_FUNCS))
"""Functions of torch.nn.functional, functions of torch, methods of torch.Tensor."""
