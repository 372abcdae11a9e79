"""The pass over a client's data that gathers all statistics at once, and the passes back that some of them need."""
