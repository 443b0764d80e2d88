"""What holds the allocated bytes: parameters, gradients, optimizer state, and tracked tensors."""
