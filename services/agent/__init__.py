"""The agent of one node: grants GPU memory, starts engines, drains and stops them, and says what runs there."""
