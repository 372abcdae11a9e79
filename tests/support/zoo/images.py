"""Networks of transformers for pictures and sound, small and with random weights."""

from __future__ import annotations

from typing import Any

import transformers as hf
from torch import nn

from support.zoo.entry import CLASSES, Draw, Entry, pictures, wave

VIT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
    "patch_size": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def of(
    name: str,
    draw: Draw = pictures,
    task: str = "Image",
    argument: str = "pixel_values",
    rate: float = 1e-2,
    **options: Any,
) -> Entry:
    def make() -> nn.Module:
        config = getattr(hf, f"{name}Config")(num_labels=CLASSES, **options)
        return getattr(hf, f"{name}For{task}Classification")(config)

    return Entry(make, draw, argument, steps=60, rate=1e-2)


IMAGES: dict[str, Entry] = {
    "ViT": of("ViT", **VIT),
    "DeiT": of("DeiT", **VIT),
    "Swin": of("Swin", image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
               mlp_ratio=2.0, drop_path_rate=0.0),
    "ConvNeXt": of("ConvNext", num_stages=2, hidden_sizes=[8, 12], depths=[1, 1], layer_scale_init_value=1.0),
    "PoolFormer": of("PoolFormer", depths=[1, 1], hidden_sizes=[8, 12], num_encoder_blocks=2, patch_sizes=[7, 3],
                     strides=[4, 2], padding=[2, 1], drop_path_rate=0.0, layer_scale_init_value=1.0, mlp_ratio=2.0),
    "ResNet": of("ResNet", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic"),
    "RegNet": of("RegNet", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], groups_width=4),
    "EfficientNet": of("EfficientNet", image_size=16, width_coefficient=0.25, depth_coefficient=0.2, depth_divisor=4,
                       kernel_sizes=[3, 3], in_channels=[32, 16], out_channels=[16, 24], strides=[1, 2],
                       num_block_repeats=[1, 1], expand_ratios=[1, 2], hidden_dim=320, depthwise_padding=[],
                       initializer_range=0.3, dropout_rate=0.0, drop_connect_rate=0.0),
    "SegFormer": of("Segformer", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16],
                    patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2],
                    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0),
    "Wav2Vec2": of("Wav2Vec2", wave, "Sequence", "input_values", hidden_size=16, num_hidden_layers=1,
                   num_attention_heads=2, intermediate_size=24, conv_dim=[8, 8], conv_stride=[4, 2],
                   conv_kernel=[8, 3], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
                   classifier_proj_size=8, hidden_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0,
                   feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0),
}  # fmt: skip
