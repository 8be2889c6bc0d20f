"""The decoder. Written for one stage of a pipeline and one rank of TP; a world of one is both."""

from megabit.model.decoder import CausalLMStage, build_stage, num_parameters

__all__ = ["CausalLMStage", "build_stage", "num_parameters"]
