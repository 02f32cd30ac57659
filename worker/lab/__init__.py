"""For demos and tests: an embedded broker, a stand-in for the registry, the demo."""
