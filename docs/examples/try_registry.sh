#!/usr/bin/env bash
# Contributes trial.jsonl to the registry KP_REGISTRY_URL, shows the unit, and deletes it. The trace's metadata must have
# "visibility": "network", "privacy_level": "aggregated" and "agent_id": "kp:agent:trial". Create the topic first:
#   kafka-topics.sh --bootstrap-server BROKERS --create --topic trial --partitions 1
set -e
export KP_ACCEPTED_TOPIC=trial KP_GROUP_ID=trial KP_CREATE_TOPICS=true
agent='{"agent_id": "kp:agent:trial", "scopes": ["read", "write"]}'
KP_REGISTRY_KEY=$(curl -s -H 'Content-Type: application/json' -d "$agent" "$KP_REGISTRY_URL/v1/auth/register" | jq -r .data.api_key)
export KP_REGISTRY_KEY
kp-worker publish trial.jsonl --topic trial
kp-worker contribute & contribute=$!
trap 'kill $contribute' EXIT
unit=$KP_REGISTRY_URL/v1/knowledge/$(jq -r .id trial.jsonl)
until curl -sf "$unit" > /dev/null; do sleep 0.2; kill -0 $contribute; done
trap - EXIT
kill $contribute
wait $contribute
curl -s "$unit" | jq .data.unit
curl -s -X DELETE -H "Authorization: Bearer $KP_REGISTRY_KEY" "$unit"
