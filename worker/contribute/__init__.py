"""`kp-worker contribute`: posts accepted traces to the registry."""
