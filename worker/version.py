"""The worker's version, as it stands in outputs, dead letters and metrics."""

__version__ = "0.2.0"
