"""Limits: admission of a tenant's requests, by several routers together."""
