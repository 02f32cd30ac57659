"""With the real model, some of them on a real Kafka too."""
