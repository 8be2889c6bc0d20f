"""The decoder. Written for the stages of one pipeline rank and one rank of TP; a world of one is
both."""

from megabit.model.decoder import CausalLMStages, build_stages, num_parameters

__all__ = ["CausalLMStages", "build_stages", "num_parameters"]
