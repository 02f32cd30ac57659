"""Neither Kafka nor the model; `make test-fast` runs the quick ones in half a minute."""
