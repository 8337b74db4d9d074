"""The router: sends each request to an instance, holds it or refuses it."""
