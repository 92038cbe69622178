"""MindSpore's names of number formats; each is torch's dtype: ``mstype.float16 is torch.float16``."""

import torch

__all__ = [
    "bfloat16", "bool_", "complex128", "complex64", "float16", "float32", "float64", "int16", "int32", "int64", "int8",
    "uint8",
]  # fmt: skip

bool_ = torch.bool
int8, int16, int32, int64, uint8 = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8
float16, bfloat16, float32, float64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
complex64, complex128 = torch.complex64, torch.complex128
