"""Documents, schemas, deployment files, rules and dashboard against the code; neither Kafka nor the model."""
