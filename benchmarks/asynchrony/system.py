"""What runs a workload, as the settings of one simulated run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """What runs the workload: the product's settings, the size of the model, and which features are switched off."""

    groups: int
    """B."""
    group_size: int
    """G."""
    ratio: float
    """α."""
    gpus: int
    """That sample."""
    slots: int = 1
    """Sequences that one of them samples at once."""
    token_s: float = 1.0
    training_gpus: int = 1
    train_s: float = 0.0
    """GPU seconds of one sample, over all epochs."""
    reward_workers: int | None = None
    """None for as many as are asked for."""
    on_stale: str = "mask"
    is_gang: bool = False
    """A group is one n=G call on one GPU."""
    is_lock_step: bool = False
    """Turns are played in rounds: all episodes sample, then all environments step."""
    is_batch: bool = False
    """Rewards begin when all responses of a round are there, and groups are judged when all rewards are."""
    redundant_groups: int = 0
    redundant_episodes: int = 0
    aborts_at_version: bool = False
    """At each update the groups, running ones too, that were admitted more than α updates ago are dropped, as ROLL does."""
    admission_poll_s: float = 0.25
