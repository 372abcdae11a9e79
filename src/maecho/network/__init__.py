"""Inside an nn.Module: layers as matrices, norms, attention, stages, neuron spaces. Knows no client."""

from maecho.network.kinds import Kind, register
from maecho.network.layers import Layer
from maecho.network.spaces import Place, Space, verify
from maecho.network.tracing import derive

__all__ = ["Kind", "Layer", "Place", "Space", "derive", "register", "verify"]
