"""Redaction and the screen, as pure as core/. The names of what they find are in core/findings.py."""
