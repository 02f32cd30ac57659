"""For trying out and for tests: an embedded broker, a stand-in for the registry, the demo."""
