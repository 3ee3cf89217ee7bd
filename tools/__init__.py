"""Programs that generate parts of the project."""
