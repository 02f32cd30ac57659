"""The chart's pods in a Docker engine: `make pod-check`."""
