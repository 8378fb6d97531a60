"""How requests run: scheduler (which tokens), context and memory (where they are), engine."""
