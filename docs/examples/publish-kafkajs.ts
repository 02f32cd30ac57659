// Publishes traces with kafkajs (docs/publishing.md): call `connect` before the first trace, `disconnect` when the process ends.
import { Kafka, Partitioners } from "kafkajs";

const kafka = new Kafka({ clientId: "agent", brokers: process.env.KP_BOOTSTRAP_SERVERS!.split(",") });
const producer = kafka.producer({
  idempotent: true, // implies acks: -1 (all)
  maxInFlightRequests: 1, // without this, kafkajs can reorder traces
  createPartitioner: Partitioners.DefaultPartitioner, // murmur2, as in Java and aiokafka
});

export const connect = () => producer.connect();
export const disconnect = () => producer.disconnect();

export async function publish(trace: { metadata: { agent_id: string } }, traceparent?: string): Promise<void> {
  await producer.send({
    topic: process.env.KP_SOURCE_TOPIC ?? "traces",
    messages: [
      {
        key: trace.metadata.agent_id,
        value: JSON.stringify(trace),
        headers: traceparent ? { traceparent } : {},
      },
    ],
  });
}
