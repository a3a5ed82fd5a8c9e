"""The only room that knows vLLM: boot its EngineCore on CPU tensors, step it, and record it.

Its release is the wheel for GPUs without what is compiled in it: scheduler, KV cache manager, worker, both model runners and
drafters are Python, and the kernels are Triton's, which engines/triton_cpu executes.
"""
