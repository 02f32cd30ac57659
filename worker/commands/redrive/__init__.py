"""kp-worker redrive: dead letters return to the source topic."""
