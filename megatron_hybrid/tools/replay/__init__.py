"""Request traces through prefix caches, without a model: this project's, and models of others."""
