"""Preflight: an unchanged training script on a phantom GPU, and what its memory would be on a card.

run.run(plan, folder, progress) -> outcome.Outcome; `child` is what runs inside the script's process.
"""
