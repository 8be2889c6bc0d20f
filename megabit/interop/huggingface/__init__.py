"""Checkpoints of Hugging Face's ``transformers``: ``BitNetForCausalLM`` to and from megabit, dense
LLaMAs as a start for training, and the arithmetic of transformers for checking an import.

``transformers`` itself is not needed.
"""

from megabit.interop.huggingface.config import Quantization
from megabit.interop.huggingface.export import ExportReport, export_huggingface
from megabit.interop.huggingface.forward import HuggingFaceMode, huggingface_logits, mode_of
from megabit.interop.huggingface.source import HuggingFaceSource

__all__ = [
    "ExportReport",
    "HuggingFaceMode",
    "HuggingFaceSource",
    "Quantization",
    "export_huggingface",
    "huggingface_logits",
    "mode_of",
]
