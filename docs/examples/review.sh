#!/usr/bin/env bash
# A reviewer reads 20 traces, drawn at random, and answers y or n. `shown` removes control characters, with which a
# trace could clear the screen or answer for the reviewer.
kp-worker tail --from-beginning --no-follow | shuf -n 20 > drawn.jsonl
while read -r line <&3; do
  jq -r 'def shown: gsub("\\p{C}+"; " "); "\n\(.task.objective | shown)\n-> \(.outcome.result_summary | shown)"' <<< "$line" >&2
  read -r -p "Did it succeed? [y/n] " answer
  jq -c --arg answer "$answer" '. + {success: ($answer == "y"), judge: "reviewer"}' <<< "$line"
done 3< drawn.jsonl | kp-worker verdict -
