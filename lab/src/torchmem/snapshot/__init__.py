"""`torchmem snapshot`: what holds the memory in a snapshot of PyTorch's allocator."""
