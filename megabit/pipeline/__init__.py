"""The pipeline: a schedule is data (``actions``).

A generator says who computes what in which order (``schedules``, ``zero_bubble``, ``v_shaped``, by
name in ``catalog``); ``communicate`` adds the messages, ``validate`` proves the whole, ``simulate``
times it, ``draw`` and ``trace`` show it, ``execute`` runs it. ``plan`` and ``balance`` lay the
model's layers on its stages.
"""
