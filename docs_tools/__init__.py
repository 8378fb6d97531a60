"""What makes the docs site from the package's source. `make docs` runs it."""
