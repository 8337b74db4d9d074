"""The operator: custom resources of Kubernetes become models and tenants of the fleet."""
