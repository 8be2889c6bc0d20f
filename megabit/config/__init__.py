"""Configuration: a frozen dataclass tree (``schema``), composed from YAML files and ``key=value``
arguments (``compose``) and checked as a whole before any process group exists (``validate``).

Nothing here imports torch, so that ``megabit config`` and ``--help`` answer at once.
"""

from megabit.config.cluster import (
    CommunicationConfig,
    Drill,
    FaultsConfig,
    OuterConfig,
    SiteConfig,
)
from megabit.config.compose import (
    config_from_tree,
    leaves,
    load_config,
    load_serving_config,
    model_to_yaml,
    to_yaml,
)
from megabit.config.schema import (
    SCHEDULE_CHUNKS,
    AlertRule,
    CheckpointConfig,
    Config,
    DataConfig,
    GuardAction,
    GuardConfig,
    GuardRule,
    LossConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TelemetryConfig,
    TrainConfig,
    shipped_alerts,
)
from megabit.config.serving import (
    EngineConfig,
    ServerConfig,
    ServingConfig,
    ServingParallelConfig,
)
from megabit.config.validate import find_problems, tree_blocks

__all__ = [
    "SCHEDULE_CHUNKS",
    "AlertRule",
    "CheckpointConfig",
    "CommunicationConfig",
    "Config",
    "DataConfig",
    "Drill",
    "EngineConfig",
    "FaultsConfig",
    "GuardAction",
    "GuardConfig",
    "GuardRule",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "OuterConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "ServerConfig",
    "ServingConfig",
    "ServingParallelConfig",
    "SiteConfig",
    "TelemetryConfig",
    "TrainConfig",
    "config_from_tree",
    "find_problems",
    "leaves",
    "load_config",
    "load_serving_config",
    "model_to_yaml",
    "shipped_alerts",
    "to_yaml",
    "tree_blocks",
]
