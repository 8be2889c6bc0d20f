"""The stability guard: judges each step by its loss and gradient, before any weight changes.

Loss and gradient norm are agreed by all ranks before they are judged, and rules are plain functions
of them and of earlier ones; so every rank comes to the same verdict without asking. What a run does
about a verdict is in ``trainer``. Rules are data (``config.GuardRule``), and each acts a bounded
number of times: from then on it only says so (``then: alert``), or ends the run (``then: stop``).

A step whose loss or gradient is not finite changes no weight, whatever the rules say.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megabit.config import GuardAction, GuardRule

MAD_TO_STD = 1.4826
"""A normal distribution's standard deviation, in units of its median distance from the median."""
SMALLEST_SPREAD = 1e-3
"""Of a window, as a share of its median: where steps hardly differ, a z-score means nothing."""

SPARES_WEIGHTS: frozenset[GuardAction] = frozenset({"skip", "rollback", "stop"})
"""Actions before which a step does not change any weight."""


@dataclass(frozen=True)
class Verdict:
    """A rule that fired at a step."""

    rule: GuardRule
    action: GuardAction
    """What is to be done: the rule's action, or what comes after it has acted often enough."""
    evidence: Mapping[str, float | int]
    """The numbers it was judged by."""

    @property
    def text(self) -> str:
        """For people."""
        numbers = ", ".join(f"{key} {_number(value)}" for key, value in self.evidence.items())
        return f"{self.rule.watch}: {numbers}: {self.action}"


@dataclass
class History:
    """Losses and gradient norms of the last steps that changed weights, oldest first."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def add(self, loss: float, norm: float, limit: int) -> None:
        """Remember one more step, and no more than ``limit``."""
        self.losses = [*self.losses, loss][-limit:]
        self.norms = [*self.norms, norm][-limit:]


@dataclass
class Deed:
    """How often a rule has acted, and when last (a step, 0-based)."""

    times: int = 0
    last_step: int = -1


@dataclass
class Guard:
    """The rules of a run and what they remember.

    ``history`` belongs to the weights: it goes back with them. ``deeds`` do not.
    """

    rules: Sequence[GuardRule]
    history: History = field(default_factory=History)
    deeds: dict[str, Deed] = field(default_factory=dict)
    """By what a rule watches and does (``_key``), so that other rules may be added and removed."""

    def judge(self, step: int, loss: float, norm: float) -> list[Verdict]:
        """The rules that fire at ``step`` (0-based), by order; remembers the step if it is good.

        Args:
            loss: mean over the step's tokens, in nats.
            norm: global L2 norm of the gradient; inf if anything in it is not finite.
        """
        verdicts = []
        for rule in self.rules:
            evidence = self._evidence(rule, step, loss, norm)
            if evidence is not None:
                verdicts.append(self._verdict(rule, step, evidence))
        spares_weights = {verdict.action for verdict in verdicts} & SPARES_WEIGHTS
        if not spares_weights and math.isfinite(loss) and math.isfinite(norm):
            self.history.add(loss, norm, self.memory)
        return verdicts

    @property
    def memory(self) -> int:
        """Steps that the rules look back."""
        windows = [rule.window * (2 if rule.watch == "plateau" else 1) for rule in self.rules]
        return max(windows, default=1)

    def _verdict(self, rule: GuardRule, step: int, evidence: Mapping[str, float | int]) -> Verdict:
        deed = self.deeds.setdefault(_key(rule), Deed())
        if rule.calm_steps is not None and step - deed.last_step > rule.calm_steps:
            deed.times = 0
        action: GuardAction = rule.action if deed.times < rule.times else rule.then
        deed.times += 1
        deed.last_step = step
        return Verdict(rule, action, {**evidence, "time": deed.times})

    def _evidence(
        self, rule: GuardRule, step: int, loss: float, norm: float
    ) -> dict[str, float | int] | None:
        """Why ``rule`` fires, or None."""
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if rule.watch == "nonfinite":
            return None if is_finite else {"loss": loss, "grad_norm": norm}
        if not is_finite:
            return None
        match rule.watch:
            case "grad_norm":
                return {"grad_norm": norm, "above": rule.above} if norm > rule.above else None
            case "loss_spike":
                return _spike("loss", loss, self.history.losses[-rule.window :], rule)
            case "grad_norm_spike":
                return _spike("grad_norm", norm, self.history.norms[-rule.window :], rule)
        # What follows looks at many steps at once, which stay the same ones for a while: once it
        # has fired, it waits for others.
        deed, span = self.deeds.get(_key(rule)), rule.window * (2 if rule.watch == "plateau" else 1)
        if deed is not None and 0 <= step - deed.last_step < span:
            return None
        if rule.watch == "grad_norm_std":
            norms = [*self.history.norms, norm][-rule.window :]
            if len(norms) < rule.window:
                return None
            std = statistics.pstdev(norms)
            return {"grad_norm_std": std, "above": rule.above} if std > rule.above else None
        losses = [*self.history.losses, loss][-span:]
        if len(losses) < span:
            return None
        before = statistics.fmean(losses[: rule.window])
        now = statistics.fmean(losses[rule.window :])
        if before - now > rule.above:
            return None
        return {"mean_loss": now, "mean_loss_before": before, "above": rule.above}


def _spike(
    name: str, value: float, window: Sequence[float], rule: GuardRule
) -> dict[str, float | int] | None:
    """``value`` against the steps before it, if it lies far above them."""
    if len(window) < rule.window:
        return None
    median = statistics.median(window)
    spread = MAD_TO_STD * statistics.median(abs(x - median) for x in window)
    score = (value - median) / max(spread, SMALLEST_SPREAD * abs(median), 1e-12)
    if score <= rule.above:
        return None
    return {name: value, "median": median, "z": score, "above": rule.above}


def _key(rule: GuardRule) -> str:
    return f"{rule.watch} above {rule.above:g} in {rule.window}: {rule.action}"


def _number(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
