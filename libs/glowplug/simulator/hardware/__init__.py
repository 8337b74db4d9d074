"""What a node does, in virtual time: engines, links, fetches and starts."""
