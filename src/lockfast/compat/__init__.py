"""Drop-in replacements for the locks of other libraries."""
