"""The HTTP server in front of an engine, and clients of it."""
