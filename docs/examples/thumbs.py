"""A service keeps what Kafka returned when it sent a trace, and appends a line for each click of a user on it."""

import json


def thumb(trace, sent, up):
    """Append what the user says of a trace; `sent` is what `await producer.send_and_wait(...)` returned."""
    about = {"agent_id": trace["metadata"]["agent_id"], "task_domain": trace["metadata"]["task_domain"]}
    place = {"partition": sent.partition, "offset": sent.offset}
    line = {"trace_id": trace["id"], **about, **place, "success": up, "judge": "users"}
    with open("thumbs.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
