"""The router: the OpenAI-compatible data port, and the admin REST beside it."""
