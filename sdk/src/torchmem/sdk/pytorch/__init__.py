"""PyTorch, read through one door: the only room that imports torch."""
