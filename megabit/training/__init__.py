"""Training: one step (``step``), the loop around it (``trainer``), and what is made of the result."""
