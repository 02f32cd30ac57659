"""report, whatif and evaluate: what scored traces say of thresholds and weights, and labelled ones of novelty."""
