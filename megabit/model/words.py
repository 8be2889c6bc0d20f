"""A model in words."""

from megabit.config import ModelConfig
from megabit.model.decoder import num_parameters


def short_model_text(model: ModelConfig) -> str:
    """Parameters, kind and layers: what tells two models of a kind apart."""
    return (
        f"{num_parameters(model) / 1e6:.2f} M parameters, {model.linear}, "
        f"{model.num_hidden_layers} layers × {model.hidden_size}"
    )


def model_text(model: ModelConfig) -> str:
    """A model's shape and size on a line."""
    heads = f"{model.num_attention_heads} heads"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} of keys and values)"
    tied = "tied" if model.tie_word_embeddings else "untied"
    return (
        f"{short_model_text(model)}, {heads}, "
        f"feed-forward {model.intermediate_size} with {model.hidden_act}, "
        f"vocabulary {model.vocab_size}, {tied}"
    )
