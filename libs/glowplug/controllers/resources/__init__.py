"""The operator: applies Kubernetes custom resources to the fleet, and reports back in their status."""
