"""Everything that talks to Kafka, except the stream: reading, writing, the cluster, and state kept on topics."""
