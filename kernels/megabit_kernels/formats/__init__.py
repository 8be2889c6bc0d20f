"""Ternary weights as other projects store them: the bytes, and what each means by a scale.

``huggingface`` is the uint8 tensor of safetensors checkpoints, ``gguf`` the tensor types TQ1_0,
TQ2_0 and I2_S of llama.cpp and bitnet.cpp. Each converts to and from the canonical packed form
(``packing``) and the scale γ, exactly in the codes; where a format cannot hold γ exactly, it says
how near it comes. Bytes that no ternary weight has are refused.

These formats mix rows or far columns in a byte: a shard is cut from the packed form and converted
afterwards, not the other way round.
"""
