"""Jobs that wait, and which of them the engine gets.

The engine is given what it computes side by side and little more: what waits, waits here, where it
can be counted, given up, and kept over a restart of the engine.
"""

from collections import deque

from megabit.serving.admission import Admission
from megabit.serving.api_error import ApiError
from megabit.serving.engine_client import EngineConnection, Job


class Dispatcher:
    """A queue in order of arrival.

    Args:
        max_sequences: that the engine computes side by side. An eighth more is handed over, so that
            there is something to begin with when one ends.
    """

    def __init__(self, admission: Admission, max_sequences: int) -> None:
        self._admission = admission
        self._capacity = max_sequences + max(1, max_sequences // 8)
        self._waiting: deque[Job] = deque()
        self._connection: EngineConnection | None = None
        self._sequences = 0

    @property
    def free(self) -> int:
        """Sequences that the engine would take at once."""
        if self._connection is None:
            return 0
        return max(0, self._capacity - self._sequences)

    def submit(self, job: Job) -> None:
        self._waiting.append(job)
        self._pump()

    def abort(self, job: Job) -> None:
        """Nobody wants the answer any more; fine for one that is done."""
        if job.sent_at is None:
            if job in self._waiting:
                self._waiting.remove(job)
                self._admission.given_up(job.place, len(job.request.prompt))
        elif self._connection is not None:
            self._connection.abort(job)

    def abort_answer(self, job: Job, index: int) -> None:
        """The same for one of several answers."""
        if job.sent_at is not None and self._connection is not None:
            self._connection.abort_answer(job, index)

    def attach(self, connection: EngineConnection) -> None:
        """An engine is ready."""
        self._connection = connection
        self._sequences = 0
        self._pump()

    def detach(self, error: ApiError) -> None:
        """The engine is lost, and with it what it had; what waits goes to the next one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            for job in list(connection.jobs.values()):
                job.inbox.fail(error)
            connection.jobs.clear()

    def fail_all(self, error: ApiError) -> None:
        """There will be no other engine."""
        self.detach(error)
        for job in self._waiting:
            job.inbox.fail(error)
            self._admission.given_up(job.place, len(job.request.prompt))
        self._waiting.clear()

    def done(self, job: Job) -> None:
        """The engine has nothing more to say about it."""
        self._sequences -= job.sequences
        self._pump()

    def _pump(self) -> None:
        while self._connection is not None and self._waiting:
            job = self._waiting[0]
            if self._sequences and self._sequences + job.sequences > self._capacity:
                return
            self._waiting.popleft()
            self._sequences += job.sequences
            self._admission.handed_over(job.place, len(job.request.prompt))
            self._connection.add(job)
