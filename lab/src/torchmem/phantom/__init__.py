"""The phantom GPU: a stub CUDA driver that runs PyTorch's real caching allocator without a GPU.

`python -m torchmem.phantom --memory 9GB -- COMMAND` runs a command on it. `torchmem preflight`
reports the memory that a script needs.
"""
