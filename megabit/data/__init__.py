"""From text to batches, one file a step.

``sources`` reads documents, ``split`` chooses the held-out ones, ``tokenizer`` learns a vocabulary,
``indexed`` stores token ids, ``prepare`` runs these four and leaves a ``corpus``; ``sampler`` cuts
a corpus into samples and ``batches`` deals the samples to ranks.

Only ``batches`` imports torch, so this file imports nothing.
"""
