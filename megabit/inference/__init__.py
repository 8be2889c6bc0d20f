"""Generate text with a model, at any layout: ``Engine`` is the way in."""

from megabit.inference.engine import Answer, Engine, Generation
from megabit.inference.messages import SamplingParams

__all__ = ["Answer", "Engine", "Generation", "SamplingParams"]
