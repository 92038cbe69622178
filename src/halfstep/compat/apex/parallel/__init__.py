"""``apex.parallel``: DistributedDataParallel, Reducer, synchronised BatchNorm and LARC, on torch's own."""

from halfstep.compat.apex.parallel.distributed import DistributedDataParallel, Reducer
from halfstep.compat.apex.parallel.larc import LARC
from halfstep.compat.apex.parallel.sync_batchnorm import (
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
)

__all__ = [
    "LARC", "DistributedDataParallel", "Reducer", "SyncBatchNorm", "convert_syncbn_model",
    "create_syncbn_process_group",
]  # fmt: skip
