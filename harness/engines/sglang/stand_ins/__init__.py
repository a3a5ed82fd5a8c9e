"""What runs in place of kernels: the runtime of Triton kernels on a CPU, and twins of CUDA ones."""
