"""Parked starts: a zygote is one process with vLLM imported; a new server is a fork of it and skips the imports.

    zygote.py     the loop: listen, fork, reap, end when no lease is held
    boot.py       turns the fork into a server, and the modules that it needs up to its first token
    patches.py    replacements in memory, so that vLLM's own children are forks too
    tokenizers.py tokenizers kept before the fork
    protocol.py   the messages on the socket
    __main__.py   `python -m glowplug_vllm.parked park|status|stop`

Rules of a zygote: one Python thread, no torch parallel region, no accelerator touched before the fork.
"""
