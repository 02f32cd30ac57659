"""On a real Kafka whose workers and brokers are killed, frozen and hung."""
