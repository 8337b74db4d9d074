"""One dashboard per file."""
