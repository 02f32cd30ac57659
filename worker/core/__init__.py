"""Values in, values out: no Kafka, no model, no clock, no environment, no logging."""
