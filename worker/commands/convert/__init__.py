"""kp-worker convert: logs of agents become traces."""
