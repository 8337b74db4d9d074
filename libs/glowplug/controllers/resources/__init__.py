"""The operator: makes the fleet what the custom resources of Kubernetes declare, and says on them what became of it."""
