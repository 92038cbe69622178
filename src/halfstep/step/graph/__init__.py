"""cuda_graph=: a whole training step captured in CUDA graphs and replayed."""
