"""CUDA graphs and the branches behind `.is_cuda`, on CPU tensors: what SGLang runs in production, on any machine."""
