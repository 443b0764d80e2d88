"""`torchmem whatif`: replays a recorded trace under other allocator settings.

As a library: `torchmem.whatif.engine.what_if(recording) -> torchmem.whatif.result.WhatIf`.
"""
