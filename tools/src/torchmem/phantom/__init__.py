"""The phantom GPU: a stub CUDA driver on which PyTorch's real caching allocator runs, on a machine without a GPU.

`python -m torchmem.phantom --memory 9GB -- COMMAND` runs a command on it; `torchmem preflight` reports what it needs.
"""
