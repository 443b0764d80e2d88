"""Access to PyTorch: the only package of the SDK that imports torch."""
