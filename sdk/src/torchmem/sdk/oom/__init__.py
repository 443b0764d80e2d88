"""The evidence that is written when memory runs out."""
