"""The pictures of the command in docs/pictures, drawn from real runs on a terminal: `make pictures`."""
