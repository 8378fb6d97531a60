"""What the command line offers beyond a plain generation."""
