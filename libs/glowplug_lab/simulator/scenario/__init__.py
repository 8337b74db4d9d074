"""A scenario file, read and checked."""
