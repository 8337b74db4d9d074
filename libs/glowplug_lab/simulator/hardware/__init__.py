"""A node in virtual time: its engines, links, fetches and starts."""
