"""All that speaks to Kafka but the stream itself: reading, writing, the cluster, and the state that is kept there."""
