"""`python -m verify.gallery`: write docs/gallery.md."""

from verify.gallery.page import main

main()
