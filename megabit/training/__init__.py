"""Training: one step (``step``), the loop around it (``trainer``), and the result for people."""
