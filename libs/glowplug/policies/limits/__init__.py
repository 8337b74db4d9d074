"""Limits: whether a request of a tenant is admitted now, by several routers that count together."""
