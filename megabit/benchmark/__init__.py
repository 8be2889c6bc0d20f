"""How fast training is: a configuration beside plain torch, and communication beside compute."""
