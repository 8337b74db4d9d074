"""The router: decides which instance answers a request, who waits and who is refused."""
