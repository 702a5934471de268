"""What FluxMesh costs and how fast it is, measured from outside. See README.md; nothing here is a test."""
