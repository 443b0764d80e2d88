"""PyTorch's CUDA caching allocator in pure Python, on simulated GPUs, with training scenarios."""
