"""Replaying a recorded trace under other allocator settings.

whatif.engine.what_if(recording, card_bytes=None, progress=None) -> whatif.result.WhatIf
"""
