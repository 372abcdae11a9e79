"""Networks of transformers for texts, small and with random weights."""

from __future__ import annotations

from typing import Any

import transformers as hf
from torch import Tensor, nn

from support.zoo.entry import CLASSES, TOKENS, Draw, Entry, ended, tokens

D, HEADS, INNER, LAYERS = 16, 2, 24, 2
ENCODER = {
    "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": INNER,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}  # fmt: skip
DECODER = {
    "hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1,
    "intermediate_size": INNER, "max_position_embeddings": 16, "head_dim": D // HEADS,
}  # fmt: skip


class Pooled(nn.Module):
    """A network without a classifier of its own, and a linear layer on the mean of its last states."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.head = body, nn.Linear(D, CLASSES)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids=input_ids).last_hidden_state.mean(1))


def classifier(name: str, draw: Draw = tokens, **options: Any) -> Entry:
    """`NameForSequenceClassification`, from a config with these options."""

    def make() -> nn.Module:
        config = getattr(hf, f"{name}Config")(
            vocab_size=TOKENS, num_labels=CLASSES, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options
        )
        return getattr(hf, f"{name}ForSequenceClassification")(config)

    return Entry(make, draw, "input_ids", steps=80, rate=1e-2)


def mamba() -> nn.Module:
    return Pooled(
        hf.MambaModel(
            hf.MambaConfig(vocab_size=TOKENS, hidden_size=D, state_size=4, num_hidden_layers=LAYERS, conv_kernel=3)
        )
    )


TEXT: dict[str, Entry] = {
    "BERT": classifier("Bert", **ENCODER),
    "DistilBERT": classifier(
        "DistilBert", dim=D, n_layers=LAYERS, n_heads=HEADS, hidden_dim=INNER, max_position_embeddings=16,
        dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    ),
    "RoBERTa": classifier("Roberta", **ENCODER),
    "ALBERT": classifier("Albert", embedding_size=8, **ENCODER),
    "ELECTRA": classifier("Electra", embedding_size=8, **ENCODER),
    "DeBERTa-v2": classifier("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"], **ENCODER),
    "FNet": classifier("FNet", hidden_size=D, num_hidden_layers=LAYERS, intermediate_size=INNER,
                       hidden_dropout_prob=0.0, initializer_range=0.2, max_position_embeddings=16),
    "SqueezeBERT": classifier("SqueezeBert", embedding_size=D, q_groups=2, k_groups=2, v_groups=2,
                              post_attention_groups=1, intermediate_groups=2, output_groups=2, **ENCODER),
    "GPT-2": classifier("GPT2", n_embd=D, n_layer=LAYERS, n_head=HEADS, n_inner=INNER, n_positions=16, resid_pdrop=0.0,
                        embd_pdrop=0.0, attn_pdrop=0.0),
    "GPT-NeoX": classifier("GPTNeoX", hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                           intermediate_size=INNER, max_position_embeddings=16),
    "Llama": classifier("Llama", **DECODER),
    "Mistral": classifier("Mistral", **DECODER),
    "Gemma": classifier("Gemma", **DECODER),
    "Qwen2": classifier("Qwen2", **{k: v for k, v in DECODER.items() if k != "head_dim"}),
    "Mixtral": classifier("Mixtral", num_local_experts=2, num_experts_per_tok=1, **DECODER),
    "OPT": classifier("OPT", hidden_size=D, num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=INNER,
                      max_position_embeddings=16, word_embed_proj_dim=D, dropout=0.0),
    "BLOOM": classifier("Bloom", hidden_size=D, n_layer=LAYERS, n_head=HEADS, hidden_dropout=0.0,
                        attention_dropout=0.0),
    "T5": classifier("T5", ended, d_model=D, d_kv=8, d_ff=INNER, num_layers=LAYERS, num_heads=HEADS, dropout_rate=0.0,
                     decoder_start_token_id=0),
    "BART": classifier("Bart", ended, d_model=D, encoder_layers=1, decoder_layers=1, encoder_attention_heads=HEADS,
                       decoder_attention_heads=HEADS, encoder_ffn_dim=INNER, decoder_ffn_dim=INNER,
                       max_position_embeddings=16, dropout=0.0, decoder_start_token_id=2, forced_eos_token_id=2),
    "Mamba": Entry(mamba, tokens, "input_ids", rate=1e-2),
}  # fmt: skip
