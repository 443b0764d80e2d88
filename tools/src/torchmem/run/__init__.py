"""`torchmem run` and TORCHMEM=1: monitoring for programs that do not call `instrument()`."""
