"""What became of every trajectory, from the run's append-only file and its lineage. Pure."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from benchmarks.stream_history import StreamHistory
from services.standalone.run_files import Lineage
from shared.ledger import Books
from shared.trajectory import Outcome

FAILURES = (Outcome.ENVIRONMENT_ERROR, Outcome.TIMEOUT)
"""Of the calculator neither comes from the environment itself: an agent has seen the hub or Redis fail."""


@dataclass(frozen=True)
class Account:
    num_finished: int
    """Trajectories that ever entered the stream."""
    num_trained: int
    lost: tuple[str, ...]
    """That left it and were neither trained in the lineage that lives nor discarded with their group."""
    missing: tuple[str, ...]
    """Groups that still run when nothing does any more: an episode of theirs was played and is nowhere."""
    trained_twice: tuple[str, ...]
    failures: tuple[str, ...] = field(default=())
    """How episodes ended that ended badly."""
    problems: tuple[str, ...] = field(default=())
    """Of the books."""


def account(history: StreamHistory, lineage: Sequence[Lineage], books: Books, *, running: Collection[str]) -> Account:
    """Args: lineage: one line for each version that lives. books: when nothing should run any more. running: groups that do."""
    trained = Counter(trajectory_id for line in lineage for trajectory_id in line.trajectory_ids)
    lost = {one for one in history.left - trained.keys() if history.entered[one].group_id not in history.discarded_groups}
    lost |= trained.keys() - history.entered.keys()
    problems = []
    if not books.is_balanced:
        problems.append(f"started must be running + ready + trained + discarded, got {books}")
    if len(lineage) != books.version:
        problems.append(f"the lineage must have a line for each of {books.version} versions, got {len(lineage)}")
    if books.trained != sum(len(line.group_ids) for line in lineage):
        problems.append(
            f"the books have {books.trained} groups trained, the lineage {sum(len(line.group_ids) for line in lineage)}"
        )
    repeated = Counter((one.group_id, one.sample_index) for one in history.entered.values())
    problems += [
        f"episode {index} of group {group} was recorded {count} times" for (group, index), count in repeated.items() if count > 1
    ]
    return Account(
        num_finished=len(history.entered),
        num_trained=len(trained),
        lost=tuple(sorted(lost)),
        missing=tuple(sorted(running)),
        trained_twice=tuple(sorted(trajectory_id for trajectory_id, count in trained.items() if count > 1)),
        failures=tuple(
            f"{one.outcome} {one.trajectory_id}: {one.detail.strip().splitlines()[-1] if one.detail else ''}"
            for one in history.entered.values()
            if one.outcome in FAILURES
        ),
        problems=tuple(problems),
    )
