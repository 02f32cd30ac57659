"""`kp-worker report`: what scored traces show, and what other settings would change."""
