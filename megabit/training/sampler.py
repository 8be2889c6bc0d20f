"""Opens the training text as the run is to read it: mapped, or in memory (``data.cache``)."""

from rich.console import Console

from megabit.checkpoint import on_all_ranks
from megabit.config import Config
from megabit.data.corpus import CorpusInfo
from megabit.data.memory import MemoryCache
from megabit.data.sampler import TrainingSampler
from megabit.faults.members import gather_members
from megabit.mesh import ParallelMesh
from megabit.retry import Retry


def open_sampler(
    config: Config, corpus: CorpusInfo, mesh: ParallelMesh, retry: Retry, console: Console
) -> TrainingSampler:
    """The samples of the run; collective over the world.

    Raises:
        UserError: the text is too short or cannot be read, or too long for the memory of a host.
    """
    data = config.data
    load = None
    if data.cache == "ram":
        members = gather_members(mesh.world, mesh.device)
        host = members[mesh.world.rank].host
        copies = sum(member.host == host for member in members)
        load = MemoryCache(copies, lambda line: console.print(line, highlight=False))

    def open_dataset() -> TrainingSampler:
        return TrainingSampler(corpus.open_train(load), data.seq_length, config.train.seed)

    return on_all_ranks(lambda: retry(open_dataset, f"reading {corpus.train_prefix}.bin"), mesh)
