"""Trees of containers with tensors as leaves."""

from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["SUPPORTED_NODES", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
