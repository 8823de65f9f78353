"""One folder per engine: command line, environment, readiness and handoff dialect; nothing outside names the engine."""
