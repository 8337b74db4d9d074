"""How the names of the store's keys begin, without the store's client: access is granted by these names."""

PREFIX = "glowplug:v1"  # of every key
