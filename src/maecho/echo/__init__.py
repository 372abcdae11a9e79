"""The layer-by-layer refit: its equations, its messages, its server and its clients."""
