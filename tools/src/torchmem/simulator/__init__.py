"""PyTorch's CUDA caching allocator in pure Python, on simulated cards, and training scenarios that drive it."""
