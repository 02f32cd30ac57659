"""An embedded Kafka."""
