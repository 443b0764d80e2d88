"""`torchmem release`: have running processes return memory to the driver."""
