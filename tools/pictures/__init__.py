"""Pictures of the command line for docs/images, drawn from real runs on a terminal: `make pictures`."""
