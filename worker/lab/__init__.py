"""For demos and tests: an embedded broker, the demo."""
