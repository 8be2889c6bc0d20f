"""megabit: train BitNet b1.58 (ternary) language models with tensor, pipeline and data parallelism.

Start at ``docs/architecture.md``; the reader's path through one training step is
``cli/train.py`` → ``training/trainer.py`` → ``pipeline/execute.py`` → ``model/`` →
``tensor_parallel/`` → ``megabit_kernels`` → ``data_parallel/`` → ``checkpoint/``.
"""

__all__ = ["__version__"]

__version__ = "0.9.0"
