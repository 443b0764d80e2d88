"""PyTorch's CUDA caching allocator in pure Python, on simulated cards, with training scenarios."""
