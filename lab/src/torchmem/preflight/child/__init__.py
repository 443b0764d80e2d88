"""Code that runs inside the script's process: it measures memory, counts steps and ends the script.

phantom/startup/sitecustomize.py -> hook.install() -> (the script imports torch) -> hook.begin()
"""
