"""Writing: the producer, its protocol, and the publication of a batch in one transaction."""
