"""Neither Kafka nor the model: half a minute for all of them, `make test-fast`."""
