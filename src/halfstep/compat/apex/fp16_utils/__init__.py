"""``apex.fp16_utils``: the tools by hand. Half networks, lists of masters, and an optimizer that owns its masters.

Everything here is explicit, as in Apex: parameters are half because somebody called these functions. The scales are
`hs.GradScaler`'s. The files have the names of Apex's.
"""

from halfstep.compat.apex.fp16_utils.fp16_optimizer import FP16_Optimizer
from halfstep.compat.apex.fp16_utils.fp16util import (
    BN_convert_float,
    FP16Model,
    clip_grad_norm,
    convert_module,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
    tofp16,
)
from halfstep.compat.apex.fp16_utils.loss_scaler import DynamicLossScaler, LossScaler

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
