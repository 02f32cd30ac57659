"""The image, built and run: `make image-test`."""
