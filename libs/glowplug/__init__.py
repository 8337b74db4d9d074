"""Glowplug: multi-LLM serving with fast cold starts."""

__version__ = "0.1.0"
