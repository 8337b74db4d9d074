"""Prefix of the store's keys, by which access is granted; needs no client."""

PREFIX = "glowplug:v1"
