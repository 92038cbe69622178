"""What functions and methods of torch do with a weight that they are given, by name: `kernels.watched` goes by it."""

import torch
from torch import Tensor

SHAPES = frozenset(
    "as_strided_ detach_ rename_ requires_grad_ resize_ resize_as_ resize_as_sparse_ set_ share_memory_ "
    "sparse_resize_ sparse_resize_and_clear_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_".split()
)
"""In-place methods that change no values."""
WRITES = frozenset(
    name
    for name in dir(Tensor)
    if (name.endswith("_") and not name.endswith("__") and not name.startswith("_") and name not in SHAPES)
    or (name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}"))
    or name == "__setitem__"
)
"""In-place methods of tensors that change values."""
FILLS = frozenset("bernoulli_ cauchy_ exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_".split())
"""Those that begin anew: nothing of earlier values is left."""
CASTS = frozenset("bfloat16 cpu cuda double float half to type xpu".split())
COPIES = CASTS | frozenset("__deepcopy__ clone contiguous detach".split())
"""Functions that give the same values again."""
READS = frozenset(
    "__abs__ __add__ __mul__ __neg__ __pow__ __radd__ __rdiv__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ "
    "__truediv__ abs add addcdiv addcmul clamp clamp_max clamp_min clip clone dist div divide exp lerp log maximum "
    "mean minimum mul multiply neg negative norm pow rsub sqrt square sub subtract sum true_divide".split()
)
"""Functions that read fp32 values by hand, also beside other low tensors: arithmetic in any format."""
NUMBERS = frozenset("__array__ __float__ allclose equal isclose item numpy tolist".split())
METHODS = READS | frozenset(
    "amax amin cos cumsum diff erf expm1 fliplr flipud flip gather index_select kthvalue log10 log1p log2 logsumexp "
    "masked_fill masked_select max median min nan_to_num nansum prod quantile reciprocal renorm repeat "
    "repeat_interleave roll rot90 round rsqrt sigmoid sign sin softmax sort std take take_along_dim tanh tile topk "
    "trace tril triu unique var where".split()
)
"""Methods of a parameter that read its fp32 value, beside `READ_TOO`. Of an alias all functions do, unless they compute
with other low tensors, as a layer does, or make tensors like it."""
MAKERS = frozenset(
    "full_like new_empty new_full new_ones new_tensor new_zeros ones_like rand_like randn_like zeros_like".split()
)
"""Functions that make a tensor in the format of a weight: by hand it is fp32, but what `empty_like` makes."""
LAYERS = frozenset({"backward", "embedding", "embedding_bag", "grad"})
"""Functions of low weights alone, or of integers too, that get these weights."""
VIEWS = frozenset(
    "__getitem__ as_strided chunk detach diagonal expand expand_as flatten hsplit movedim narrow permute ravel reshape "
    "reshape_as select split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten "
    "unfold unsqueeze view view_as vsplit".split()
)
"""Functions whose results may be views: aliases of a part of the weight."""
READ_TOO = (
    frozenset(
        name
        for name in set(dir(Tensor)) - WRITES - METHODS - VIEWS - NUMBERS - CASTS
        if callable(getattr(torch, name, None))
        and not (
            name.startswith(("_", "is_")) or name in {"device", "dtype", "get_device", "layout", "numel", "storage"}
        )
    )
    | MAKERS
    | frozenset("__eq__ __floordiv__ __ge__ __gt__ __le__ __lt__ __matmul__ __mod__ __ne__ __rmatmul__".split())
)
"""Methods that this class leaves as they are and that read fp32 values by hand, as the functions of torch do."""
