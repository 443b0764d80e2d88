"""What keeps the SDK from harming training: errors, interruptions, the main thread, and cost."""
