"""Commands of the command line beyond generation."""
