"""Every Redis key of a run: its type, its writer, its readers and its bound.

All keys of a run share the hash tag `{run_id}`, so that one Lua script may touch several of them on a cluster too.

| key           | type    | holds                                                    | writer         | bound                      |
| ------------- | ------- | -------------------------------------------------------- | -------------- | -------------------------- |
| ledger        | hash    | versions, ratio, batch_groups, counts by state           | ledger scripts | a dozen fields             |
| running       | zset    | group id → lease expiry, Unix ms                         | ledger scripts | admission                  |
| owners        | hash    | group id → agent process that holds the lease            | ledger scripts | admission                  |
| ready         | zset    | group id → start number, oldest first                    | ledger scripts | admission                  |
| unsaved       | zset    | group id → version trained, until a checkpoint holds it  | ledger scripts | groups between checkpoints |
| groups        | hash    | group id → GroupRecord, JSON                             | ledger scripts | running + ready + unsaved  |
| finished      | hash    | group id → episodes; `id:index` → entry; `id:tokens`     | ledger scripts | running + ready + unsaved  |
| requeued      | list    | GroupRecord of tasks to run again, next first            | ledger scripts | admission                  |
| cursors       | hash    | environment → index of its next task                     | ledger scripts | environments               |
| trajectories  | stream  | trajectory records, consumer group `trainer`             | ledger scripts | removed when acknowledged  |
| dead_letters  | stream  | records nobody could read, with the reason               | ledger scripts | newest 1,000               |
| holds         | zset    | hold on new groups → when it counts as given up, Unix ms | ledger scripts | evaluations under way      |
| processes     | zset    | agent process → when it counts as dead, Unix ms          | ledger scripts | agent processes            |
| endings       | channel | `reason group_id` of running groups that end, for owners | ledger scripts | nothing is kept            |
| environments  | hash    | environment name → EnvironmentSpec, JSON                 | env_agents     | registered environments    |
| recent:{name} | list    | an environment's episodes as [outcome, reward], JSON     | env_agents     | newest 256                 |
| last_problems | hash    | environment name → why its last bad episode ended, JSON  | env_agents     | registered environments    |
| pipeline      | string  | PipelineReport of the last updates, JSON                 | trainer        | one report                 |
| engines       | hash    | engine URL → registration, JSON                          | inference_hub  | registered engines         |
| weights       | hash    | weights in force, the trainer's address, the last update | inference_hub  | a few fields               |
"""

from dataclasses import dataclass
from typing import Final

CONSUMER_GROUP: Final = "trainer"
CONSUMER_NAME: Final = "rank-0"
"""One consumer name for the life of a run: a trainer that restarts finds what its predecessor had not acknowledged."""
MAX_DEAD_LETTERS: Final = 1_000


@dataclass(frozen=True)
class Keys:
    """The names of one run's keys."""

    run_id: str

    def _key(self, name: str) -> str:
        return f"headrace:{{{self.run_id}}}:{name}"

    @property
    def ledger(self) -> str:
        return self._key("ledger")

    @property
    def running(self) -> str:
        return self._key("running")

    @property
    def owners(self) -> str:
        return self._key("owners")

    @property
    def ready(self) -> str:
        return self._key("ready")

    @property
    def unsaved(self) -> str:
        return self._key("unsaved")

    @property
    def groups(self) -> str:
        return self._key("groups")

    @property
    def finished(self) -> str:
        return self._key("finished")

    @property
    def requeued(self) -> str:
        return self._key("requeued")

    @property
    def cursors(self) -> str:
        return self._key("cursors")

    @property
    def trajectories(self) -> str:
        return self._key("trajectories")

    @property
    def dead_letters(self) -> str:
        return self._key("dead_letters")

    @property
    def pipeline(self) -> str:
        return self._key("pipeline")

    @property
    def processes(self) -> str:
        return self._key("processes")

    @property
    def endings(self) -> str:
        return self._key("endings")

    @property
    def holds(self) -> str:
        return self._key("holds")

    @property
    def environments(self) -> str:
        return self._key("environments")

    def recent_episodes(self, environment: str) -> str:
        return self._key(f"recent:{environment}")

    @property
    def last_problems(self) -> str:
        return self._key("last_problems")

    @property
    def engines(self) -> str:
        return self._key("engines")

    @property
    def weights(self) -> str:
        return self._key("weights")
