"""What several commands use: the console, sessions with Kafka, JSON Lines, scored documents, pages."""
