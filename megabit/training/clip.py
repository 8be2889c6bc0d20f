"""How much gradients are scaled before an update, given the norm of all of them.

A formula in circulation scales gradients by α = min(2, 1 + (1 − ‖g‖/t)), with a threshold t. The
second argument is 2 − ‖g‖/t: the first-order Taylor expansion, at ‖g‖ = t, of t/‖g‖, which is what
scales a gradient to the norm t. It is near that where no scaling is needed. Far from there it is
not: it is 0 at ‖g‖ = 2t, and *negative* beyond. Just when gradients explode, the update would
climb. What was meant is bounded below by 0 for every norm: min(2, t/‖g‖), in general
min(boost, limit/‖g‖). With a boost of 1 that is clipping by the global norm, as everyone has it.
"""


def gradient_factor(norm: float, limit: float, boost: float = 1.0) -> float:
    """What gradients of global L2 norm ``norm`` are multiplied with: min(boost, limit / norm).

    Above 0 for every finite norm. Adam divides a gradient by its own size, so a boost matters where
    norms vary from step to step.

    Args:
        norm: finite; a step whose gradient is not is to be skipped.
        limit: the norm that gradients are scaled down to; 0: gradients stay as they are.
        boost: gradients below ``limit`` are scaled up to it, by this factor at most; 1: not.
    """
    if limit <= 0 or norm <= 0:
        return 1.0
    return min(boost, limit / norm)
