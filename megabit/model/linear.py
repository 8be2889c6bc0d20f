"""The model's one choice between ternary and dense layers."""

from megabit.config import ModelConfig
from megabit.tensor_parallel import (
    ColumnParallelBitLinear,
    ColumnParallelLinear,
    RowParallelBitLinear,
    RowParallelLinear,
)


def linear_types(model: ModelConfig) -> tuple[type[ColumnParallelLinear], type[RowParallelLinear]]:
    """Column- and row-parallel layer classes for ``model.linear``."""
    if model.linear == "ternary":
        return ColumnParallelBitLinear, RowParallelBitLinear
    return ColumnParallelLinear, RowParallelLinear
