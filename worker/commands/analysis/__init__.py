"""report, whatif and evaluate: thresholds and weights judged on scored traces, and novelty on labelled ones."""
