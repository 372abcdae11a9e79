"""Fits the merged network layer after layer: the equations, the messages, the server and the clients."""
