"""Replaying a recorded trace under other allocator settings."""
