"""Disasters, each run by a script on real Kafka: `make disasters`, `make disasters ARGS=disk`."""
