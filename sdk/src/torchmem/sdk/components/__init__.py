"""What holds the allocated bytes: parameters, gradients, optimizer state, and parts of a script."""
