"""One file per GPU subject: what NVML reports about it, how it is read, and its metric families."""
