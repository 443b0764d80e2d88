"""What runs inside the script's process: it watches the memory, counts the steps and ends the script.

startup/sitecustomize.py -> hook.install() -> (torch is imported) -> begin.begin()
"""
