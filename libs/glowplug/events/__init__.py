"""The contract: facts (past tense), telemetry and commands (imperative) as frozen dataclasses, and their codec."""

from glowplug.events.envelope import Event, decode, encode

__all__ = ["Event", "decode", "encode"]
