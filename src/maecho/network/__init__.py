"""Inside an nn.Module: layers as matrices, norms, attention, stages, neuron spaces. Knows no client."""
