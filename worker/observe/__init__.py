"""What others see of a worker: metrics, logs, spans, health and the status page."""
