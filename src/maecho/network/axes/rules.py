"""Which rule is whose: tables of the functions, methods and modules of torch that a trace meets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from maecho.network.axes.along import Rule, before_last, indexed, padded, permuted, reduced, reshaped, resized

ELEMENTWISE = frozenset({
    "add", "iadd", "add_", "sub", "isub", "sub_", "rsub", "mul", "imul", "mul_", "truediv", "itruediv", "div", "div_",
    "neg", "abs", "pow", "square", "sqrt", "rsqrt", "exp", "log", "clamp", "clip", "maximum", "minimum", "where",
    "gt", "ge", "lt", "le", "eq", "ne", "relu", "relu_", "relu6", "leaky_relu", "gelu", "silu", "tanh", "sigmoid",
    "elu", "selu", "celu", "mish", "softplus", "hardswish", "hardtanh", "hardsigmoid", "logsigmoid", "softsign",
    "softmax", "log_softmax", "dropout", "dropout1d", "dropout2d", "dropout3d", "contiguous", "detach", "clone", "to",
    "float", "double", "half", "type_as",
})  # fmt: skip
"""Functions and methods whose result has an entry for each entry of their tensors, which are broadcast.

An entry may depend on others of its axis (softmax), but not on their order.
"""

JOINING = frozenset({"cat", "concat"})
"""Functions that lay tensors end to end on one axis."""

SHAPES = frozenset({"size", "dim", "numel", "shape", "ndim", "dtype", "device", "is_floating_point"})
"""What reads no entries."""

RULES: dict[str, Rule] = {
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "unsqueeze", "unflatten", "view_as", "ravel"), reshaped),
    **dict.fromkeys(("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "T", "mT"), permuted),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "std", "var", "prod", "logsumexp"), reduced),
    **{f"{kind}_pool{k}d": before_last(k) for kind in ("max", "avg", "lp") for k in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{k}d": before_last(k) for kind in ("max", "avg") for k in (1, 2, 3)},
    "pad": padded,
    "interpolate": resized,
    "getitem": indexed,
}
"""Functions and methods of one tensor."""

ELEMENTWISE_MODULES = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Hardswish, nn.Hardtanh, nn.Hardsigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Softmax, nn.LogSoftmax,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity,
)  # fmt: skip

_LAST: tuple[tuple[int, tuple[type[nn.Module], ...]], ...] = (
    (1, (
        nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d,
        nn.ReplicationPad1d, nn.ReflectionPad1d, nn.ZeroPad1d, nn.ConstantPad1d,
    )),
    (2, (
        nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d,
        nn.ReplicationPad2d, nn.ReflectionPad2d, nn.ZeroPad2d, nn.ConstantPad2d,
    )),
    (3, (
        nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d,
        nn.ReplicationPad3d, nn.ReflectionPad3d, nn.ZeroPad3d, nn.ConstantPad3d,
    )),
)  # fmt: skip


def of_module(module: nn.Module) -> Rule | None:
    """The rule of a module without parameters that is not elementwise. None if there is no such rule."""
    if isinstance(module, nn.Flatten | nn.Unflatten):
        return reshaped
    if isinstance(module, nn.Upsample):
        return resized
    return next((before_last(k) for k, types in _LAST if isinstance(module, types)), None)


def weighted_axes(module: nn.Module, x: Tensor) -> Sequence[int] | None:
    """The axes of x along which a normalisation has weights, in the order of the axes of these weights.

    Its other axes may be permuted, too: they are normalised one by one, or all together. None if the module is no
    normalisation, or if it normalises neurons in groups.
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return range(x.dim() - len(module.normalized_shape), x.dim())
    if isinstance(module, nn.GroupNorm):
        return [1] if module.num_groups in (1, module.num_channels) else None
    for places, instance in enumerate((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1):
        if isinstance(module, instance):
            return [x.dim() - 1 - places]
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return [1]
    if isinstance(module, nn.PReLU):
        return [1] if module.num_parameters > 1 else []
    return None
