"""On a real Kafka, with the stand-in embedder or none."""
