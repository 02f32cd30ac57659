#!/usr/bin/env bash
# Traces that were refused because the registry has another unit with their id (docs/contribute.md):
#   conflict.sh             numbers them, in conflicts.jsonl
#   conflict.sh N           shows how trace N (>) differs from the registry's unit (<)
#   conflict.sh N replace   deletes the unit with AGENT_KEY, a key of its agent, and sends the trace again
set -e
if [ $# = 0 ]; then
  kp-worker redrive --refused --reason conflict --to-file conflicts.jsonl --execute
  jq -r '.value | fromjson | [.id, .metadata.agent_id] | @tsv' conflicts.jsonl | cat -n
  exit
fi
letter=$(sed -n "$1p" conflicts.jsonl)
unit=$KP_REGISTRY_URL/v1/knowledge/$(jq -r '.value | fromjson | .id' <<< "$letter")
if [ "$2" = replace ]; then
  curl -s -X DELETE -H "Authorization: Bearer $AGENT_KEY" "$unit"
  kp-worker redrive --refused $(jq -r '"--partition \(.partition) --offset \(.offset)"' <<< "$letter") --execute
else
  diff <(curl -s "$unit" | jq -S .data.unit) <(jq -S '.value | fromjson | del(.scoring)' <<< "$letter")
fi
