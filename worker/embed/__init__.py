"""From a text to its vector: the model runtimes, the pool that they run in, exported models."""
