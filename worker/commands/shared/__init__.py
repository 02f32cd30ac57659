"""Parts that several commands share: the console, sessions with Kafka, JSON Lines, scored documents, pages."""
