"""What tests share: builders, Kafka, processes, load and violence, judges. No tests."""
