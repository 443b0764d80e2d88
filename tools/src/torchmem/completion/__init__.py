"""`torchmem completion`: command line completion for shells."""
