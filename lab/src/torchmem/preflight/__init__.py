"""Preflight: run an unchanged training script on a phantom GPU and report the memory it needs.

run.run(plan, folder, progress) -> result.RunResult. `child` runs inside the script.
"""
