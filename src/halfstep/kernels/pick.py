import torch
def norms_for(ts): return torch.stack(torch._foreach_norm(list(ts),2,dtype=torch.float32))
def total_norm(n): return torch.linalg.vector_norm(n)
