"""`make image-test`: build the container image and score traces in it against the embedded broker."""
