"""The chart on a real Kubernetes API server: `make cluster-check`."""
