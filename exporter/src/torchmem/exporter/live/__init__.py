"""The live page of one node, and the state document behind it."""
