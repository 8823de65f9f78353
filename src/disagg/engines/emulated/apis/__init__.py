"""The APIs of the engine, one module each: how its requests are read and its answers written."""
