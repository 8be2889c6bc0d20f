"""``megabit plan``: what every layout of a model would need and take on so many ranks, on paper."""
