"""One folder per engine: command line, environment, readiness, handoff dialect; nothing outside names the engine."""
