"""All that can be observed of a worker: metrics, logs, spans, health and the status page."""
