"""Returns memory to the driver: by tiers, on request, and for other processes on the GPU."""
