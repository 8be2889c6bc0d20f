"""Models and sizes in words."""

from megabit.config import ModelConfig


def size_text(size: float) -> str:
    """Bytes for people: 999 B, 1.5 kB, 12.3 MB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def model_text(model: ModelConfig) -> str:
    """A model's shape and size on a line."""
    from megabit.model import num_parameters

    heads = f"{model.num_attention_heads} heads"
    if model.num_key_value_heads != model.num_attention_heads:
        heads += f" ({model.num_key_value_heads} of keys and values)"
    tied = "tied" if model.tie_word_embeddings else "untied"
    return (
        f"{num_parameters(model) / 1e6:.2f} M parameters, {model.linear}, "
        f"{model.num_hidden_layers} layers × {model.hidden_size}, {heads}, "
        f"feed-forward {model.intermediate_size} with {model.hidden_act}, "
        f"vocabulary {model.vocab_size}, {tied}"
    )
