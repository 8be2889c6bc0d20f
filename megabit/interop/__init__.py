"""Models of other projects: read and write what their tools do."""
