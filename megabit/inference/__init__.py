"""Generate text with a model, at any layout."""
