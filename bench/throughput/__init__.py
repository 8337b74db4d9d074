"""Tokens a second of one instance of a fleet, beside the engine library's own server on the same file."""
