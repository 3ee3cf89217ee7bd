"""What is made for the project by programs, and not by hand."""
