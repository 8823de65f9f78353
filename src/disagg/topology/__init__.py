"""WHAT is deployed: frozen specs, read from YAML and flags, checked against each other."""
