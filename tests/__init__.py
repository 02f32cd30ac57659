"""The tests; docs/contributing.md says how they are laid out. The folder of a test is its tier."""
