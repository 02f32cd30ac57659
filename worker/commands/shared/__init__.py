"""Parts shared by several commands: the console, sessions with Kafka, JSON Lines, scored documents, pages."""
