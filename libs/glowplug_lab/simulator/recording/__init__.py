"""A live fleet's recorded events, read into a scenario."""
