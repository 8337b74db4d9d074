"""Which instances leave a GPU for another."""
