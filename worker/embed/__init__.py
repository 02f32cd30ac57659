"""From a text to its vector: the model runtimes, the pool that runs them, and exported models."""
