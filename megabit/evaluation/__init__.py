"""How good a model is, at any layout: the loss of texts, and tasks of lm-evaluation-harness.

There is no optimizer here: ``forward`` runs forward passes, ``text_loss`` sums the loss of a
``text_sets.TextSet``, ``continuations`` and ``greedy`` answer what tasks ask, and ``opening`` loads
a model from disk for them. Only ``lm_eval_adapter`` needs the extra ``megabit[lm-eval]``.
"""
