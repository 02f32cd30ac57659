"""All that speaks to Kafka but the stream itself: the client, topics, transactions, restore, refusals."""
