"""Routing of requests to replicas, by the prefixes that each could resume and by load."""
