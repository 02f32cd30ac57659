// Stores each accepted trace as one row in Postgres; docs/reading-the-accepted-topic.md explains it.
import { KafkaJS } from "@confluentinc/kafka-javascript";
import { DatabaseError, Pool } from "pg";

const TABLES = `
CREATE TABLE IF NOT EXISTS accepted (
  id TEXT PRIMARY KEY, score DOUBLE PRECISION NOT NULL, source TEXT NOT NULL, document TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS unreadable (place TEXT PRIMARY KEY, error TEXT NOT NULL, value BYTEA);
CREATE TABLE IF NOT EXISTS judged (
  source TEXT NOT NULL, judge TEXT NOT NULL, success DOUBLE PRECISION NOT NULL, PRIMARY KEY (source, judge)
);
`; // what stands: SELECT * FROM accepted WHERE source NOT IN (SELECT source FROM judged WHERE success < 0.5)
const UPSERT = `
INSERT INTO accepted (id, score, source, document) VALUES ($1, $2, $3, $4)
ON CONFLICT (id) DO UPDATE SET score = excluded.score, source = excluded.source, document = excluded.document
`;
const SET_ASIDE = "INSERT INTO unreadable (place, error, value) VALUES ($1, $2, $3) ON CONFLICT (place) DO NOTHING";
const JUDGE = `
INSERT INTO judged (source, judge, success) VALUES ($1, $2, $3)
ON CONFLICT (source, judge) DO UPDATE SET success = excluded.success
`;
const JUDGED_TOPIC = process.env.KP_JUDGED_TOPIC;

const database = new Pool({ connectionString: process.env.DATABASE_URL });
const kafka = new KafkaJS.Kafka({ kafkaJS: { brokers: process.env.KP_BOOTSTRAP_SERVERS!.split(",") } });
const consumer = kafka.consumer({
  kafkaJS: { groupId: "ingest", fromBeginning: true, autoCommit: false, readUncommitted: false },
});

type Values = (string | number)[];

function textOf(value: Buffer | null): string {
  if (value === null) throw new TypeError("the record has no value");
  return new TextDecoder("utf-8", { fatal: true }).decode(value);
}

/** The source record that a verdict is about, its judge and the success; null if it is not in effect. */
function judgement(value: Buffer | null): Values | null {
  const { source, trace_offset, verdict, counts } = JSON.parse(textOf(value));
  return counts ? [JSON.stringify({ ...source, offset: trace_offset }), verdict.judge, verdict.success] : null;
}

/** What the table has of a document. The whole document is kept, with the fields that are unknown here. */
function row(value: Buffer | null): Values {
  const text = textOf(value);
  const { id, scoring } = JSON.parse(text);
  if (typeof id !== "string" || !Number.isFinite(scoring.score)) throw new TypeError("no id, or no score");
  return [id, scoring.score, JSON.stringify(scoring.source), text];
}

/** Whether an error is the record's: it would come again. Otherwise the database is away, and the batch comes again. */
function isOfTheRecord(error: unknown): boolean {
  if (error instanceof DatabaseError) return /^(22|23|54)/.test(error.code ?? ""); // data, constraint, limit
  return error instanceof SyntaxError || error instanceof TypeError;
}

async function store(topic: string, place: string, value: Buffer | null): Promise<void> {
  try {
    const judged = topic === JUDGED_TOPIC;
    const values = judged ? judgement(value) : row(value);
    if (values) await database.query(judged ? JUDGE : UPSERT, values);
  } catch (error) {
    if (!isOfTheRecord(error)) throw error;
    console.error(`${place} cannot be read: ${error}`);
    await database.query(SET_ASIDE, [place, String(error), value]);
  }
}

async function main(): Promise<void> {
  await database.query(TABLES);
  await consumer.connect();
  const accepted = process.env.KP_ACCEPTED_TOPIC ?? "traces.accepted";
  await consumer.subscribe({ topics: JUDGED_TOPIC ? [accepted, JUDGED_TOPIC] : [accepted] });
  await consumer.run({
    eachBatch: async ({ batch }) => {
      const { topic, partition } = batch;
      for (const { offset, value } of batch.messages) await store(topic, `${topic}/${partition}/${offset}`, value);
      await consumer.commitOffsets([{ topic, partition, offset: String(BigInt(batch.lastOffset()) + 1n) }]);
    },
  });
  for (const signal of ["SIGINT", "SIGTERM"]) {
    process.once(signal, () => consumer.disconnect().then(() => database.end()));
  }
}

main();
