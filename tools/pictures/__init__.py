"""The pictures of the command in docs/images, drawn from real runs on a terminal: `make pictures`."""
