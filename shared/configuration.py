"""The run file: one YAML file, one section for each process, read strictly.

    configuration = load(Path("run.yaml"), overrides=["trainer.learning_rate=1e-5"])

An unknown key, a wrong type and a value out of range are ConfigurationErrors. Nothing is rewritten or derived: a process that
needs a derived value computes it. Environment variables carry only addresses (`ADDRESS_VARIABLES`) and secrets (redis_address).
"""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared import advantage_settings, redis_address, strict_yaml
from shared.advantage_settings import AdvantageSection, CriticSection
from shared.environment_spec import EnvironmentSpec, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from shared.errors import ConfigurationError
from shared.loss_settings import CorrectionSection, KlSection, PolicyLossSection, check_single_correction, check_variant
from shared.names import Name

Port = Annotated[int, Meta(ge=0, le=65535)]
WeightTransport = Literal["broadcast", "disk", "tensor"]

ADDRESS_VARIABLES: Mapping[str, str] = {
    "HEADRACE_REDIS_URL": "redis.url",
    "HEADRACE_HUB_URL": "inference_hub.url",
    "HEADRACE_AGENTS_URL": "env_agents.url",
}
"""Environment variable → the key it sets, for deployments where addresses are not known when the run file is written."""


class RunSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all processes agree on."""

    id: Name
    """Names the run's Redis keys."""
    directory: str
    """Checkpoints, metrics and logs go here."""
    model_path: str
    """A Hugging Face model directory: weights to start from, and the tokenizer."""
    seed: NonNegativeInt = 0


class RolloutSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is rolled out, and how far ahead of training."""

    rollout_batch_size: PositiveInt = 16
    """B, groups consumed by one update."""
    num_return_sequences_in_group: PositiveInt = 8
    """G, finished episodes of one task that make a group."""
    redundant_episodes: NonNegativeInt = 0
    """R: a group starts G + R episodes, is complete with the first G, and the rest are cancelled."""
    redundant_groups: NonNegativeInt = 0
    """Groups beyond α that may run while no whole batch is ready. What is not needed for it stays for the next, if not stale."""
    group_deadline_s: PositiveFloat | None = None
    """A group that runs longer is complete with `min_group_size` finished episodes; None waits for all G."""
    min_group_size: PositiveInt = 2
    group_filters: tuple[str, ...] = ()
    """Groups not worth training, discarded when they complete: zero_variance, all_failed, or package.module:function of a
    group's trajectories, inside env_agents.import_allowlist, that says whether to discard it."""
    max_filtered_groups: PositiveInt = 256
    """Training stops when filters discard so many groups in a row."""
    kl_fallback_threshold: PositiveFloat | None = 0.02
    """Over this KL(behaviour ‖ trained), measured on a batch before its first step, admission behaves as if α were 0 for
    `kl_fallback_updates`; None never does."""
    kl_fallback_updates: PositiveInt = 4
    async_generation_ratio: NonNegativeFloat = 1.0
    """α: how many batches generation may run ahead. 0 is synchronous, 1 one-step off-policy, above fully asynchronous; between
    two whole numbers, that share of each batch starts earlier. No token is trained at a lag above ⌈α⌉."""
    on_stale: Literal["regenerate", "drop", "wait", "mask"] = "mask"
    """What happens at the bound. mask: a group is trained without its tokens over it. regenerate: such a group is discarded and its
    task runs again first. drop: discarded, and its task does not run again. wait: training waits for running groups that would
    pass it, up to `stale_wait_s`, then regenerates; it does without as many as there are redundant groups."""
    stale_wait_s: PositiveFloat = 600.0
    """Longest wait of one update for such groups, with on_stale: wait."""


class RedisSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str = "redis://127.0.0.1:6379/0"
    """Without the password, which HEADRACE_REDIS_PASSWORD or HEADRACE_REDIS_PASSWORD_FILE gives (shared/redis_address.py)."""
    require_aof: bool = True
    """Refuse a Redis without an append-only file. False is for one that persists otherwise, or a run that may be lost."""


class EnginesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Inference engines. `headrace up` starts `count` of them; `urls` are engines that run already."""

    count: NonNegativeInt = 1
    urls: tuple[str, ...] = ()
    discovery: tuple[str, ...] = ()
    """URLs whose names stand for any number of engines, as a Compose service or a headless Kubernetes service does: the hub
    registers every address that http://engine:30000 resolves to, and forgets those that are gone."""
    device: Literal["cpu", "cuda"] = "cuda"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    tensor_parallel_size: PositiveInt = 1
    max_total_tokens: PositiveInt | None = None
    """KV cache size in tokens; None lets the engine fill its memory."""
    mem_fraction_static: Annotated[float, Meta(gt=0, lt=1)] | None = None
    arguments: tuple[str, ...] = ()
    """More arguments of `sglang.launch_server`, as it spells them."""
    start_timeout_s: PositiveFloat = 600.0


class InferenceHubSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8800
    url: str | None = None
    """Where others reach the hub; None means http://host:port."""
    generate_timeout_s: PositiveFloat = 3600.0
    """Total deadline of one generate call, retries and weight updates included."""
    max_attempts: PositiveInt = 4
    """Engines tried for one generate call before the caller sees an error."""
    max_waiting_calls: PositiveInt = 65_536
    """Calls that wait in the hub for an engine; one more is answered 429."""
    max_body_bytes: PositiveInt = 16 * 2**20
    """Of a generate call; a larger one is answered 413."""
    segment_tokens: PositiveInt | None = None
    """A longer generation is asked for in pieces of so many tokens: what an engine that dies takes with it. None: in one piece."""
    routing: Literal["affinity", "least_tokens", "round_robin", "power_of_two"] = "affinity"
    """affinity: an episode stays with the engine whose cache holds its prefix, until that is overloaded."""
    probe_interval_s: PositiveFloat = 2.0
    hang_timeout_s: PositiveFloat = 60.0
    """An engine with calls that shows no progress for so long is taken out, and its calls go on elsewhere. Above its longest step:
    a chunk of a prefill, or kernels that are compiled when they are first used."""
    weight_update_timeout_s: PositiveFloat = 300.0
    """Deadline of each step of a weight update."""
    engine_hosts: tuple[str, ...] = ("*",)
    """Hosts at which POST /engines admits engines: names, patterns such as *.cluster.local, networks such as 10.0.0.0/8."""
    engine_version: str = "0.5.23"
    """SGLang version every engine must have; `any` accepts all."""

    @property
    def address(self) -> str:
        return self.url or f"http://{self.host}:{self.port}"


class EnvAgentsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8801
    url: str | None = None
    """Where others reach this process; None means http://host:port."""
    renderer: str = "auto"
    """Chat format, a name the `renderers` package knows (`qwen3`, …); auto takes it from the model."""
    renderer_options: dict[str, Any] = {}
    """Options of the renderer, such as enable_thinking."""
    import_allowlist: tuple[str, ...] = ("examples",)
    """Packages that environments, rewards and filters may be imported from, and have to be defined in."""
    environment_hosts: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    """Hosts at which remote environments and HTTP rewards may be: names, patterns such as *.cluster.local, networks such as
    10.0.0.0/8 that every address of a name has to be in. By default this machine's own."""
    environments: tuple[EnvironmentSpec, ...] = ()
    """Registered at start; more by POST /environments."""
    lease_s: PositiveFloat = 30.0
    """A process silent for this long loses its groups to another one."""

    @property
    def address(self) -> str:
        return self.url or f"http://{self.host}:{self.port}"


class CheckpointSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    every_updates: PositiveInt = 10
    keep: PositiveInt = 2
    resume: Literal["auto", "never"] = "auto"
    max_failed_saves: NonNegativeInt = 2
    """Saves that may fail in a row, on a full disk for one, before training stops; 0 stops at the first. What was trained since the
    last durable checkpoint stays in Redis meanwhile."""


class EvaluationSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Held-out tasks, before the first update, every `every_updates`, and after the last. 0 episodes: none."""

    every_updates: PositiveInt = 10
    num_episodes: NonNegativeInt = 0
    greedy: bool = True
    """Also evaluate at the most likely token, beside the environment's own sampling."""


class WeightPushSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    transport: WeightTransport = "broadcast"
    """broadcast: from rank 0 over `backend`. disk: safetensors in `directory`, for engines across a slow link. tensor: engines on
    the trainer's own node map rank 0's memory, of the GPU or of the machine."""
    directory: str | None = None
    """With transport: disk, a folder that trainer and engines see under the same path."""
    backend: Literal["gloo", "nccl"] = "nccl"
    bucket_mib: PositiveInt = 512
    """Up to two buckets are in memory at a time, beside the model."""
    mode: Literal["in_place", "retract"] = "in_place"
    """What running requests do: keep their KV cache, or recompute it under the new weights."""
    rolling_groups: PositiveInt = 1
    """Above 1, engines are updated in so many groups by turns, and the others go on generating."""
    verify_every: PositiveInt = 50
    """Checksums of the engines' weights are compared with the trainer's on the first update, every so many, and after a failure."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for a group to form, and for one bucket. Below inference_hub.weight_update_timeout_s, so that engines which wait
    for one that hangs are let go before the hub gives them up too."""


class LoraSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Low-rank adapters in place of full-weight training, arXiv:2106.09685. Engines and exports get the merged weights."""

    rank: PositiveInt = 16
    alpha: PositiveFloat = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Over 0, trainer and engine disagree by it about the same tokens."""
    target_modules: tuple[str, ...] = ()
    """Ends of the names of the layers that get one, such as q_proj; none means every linear layer but the output's."""


class TrainerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_updates: PositiveInt
    """Updates after which training ends, over all resumptions."""
    num_processes: PositiveInt = 1
    """Ranks that `headrace up` starts; with `deepspeed trainer/train.py` DeepSpeed's own flags and hostfile decide."""
    learning_rate: PositiveFloat = 1e-6
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up: stays, or falls to `final_learning_rate` at the last update."""
    final_learning_rate: NonNegativeFloat = 0.0
    warmup_updates: NonNegativeInt = 0
    """Updates in which the learning rate rises linearly."""
    weight_decay: NonNegativeFloat = 0.0
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: PositiveFloat = 1.0
    adv_estimator: str = "grpo"
    """grpo, rloo, lite_ppo, gigpo, step_reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, gae, or package.module:name
    of an AdvantageEstimator of one's own (trainer/advantages.py) inside `import_allowlist`."""
    advantage: AdvantageSection = AdvantageSection()
    critic: CriticSection | None = None
    """The value model that gae needs, and nothing else takes."""
    pg_variant: str = "ppo"
    """The policy loss: ppo, tis, vanilla, cispo, topr, kimi15, decoupled_ppo, gspo, clamped_is, or package.module:function, a
    trainer.losses.PolicyLossFunction of one's own inside `import_allowlist`."""
    import_allowlist: tuple[str, ...] = ("examples",)
    """Packages that `pg_variant` and `adv_estimator` may be imported from."""
    policy_loss: PolicyLossSection = PolicyLossSection()
    correction: CorrectionSection = CorrectionSection()
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = "token-mean"
    """How tokens' losses become one number, over the whole batch."""
    loss_norm_tokens: PositiveInt | None = None
    """L, the constant that seq-mean-token-sum-norm divides by, usually the most tokens that an episode may sample."""
    kl: KlSection = KlSection()
    ppo_epochs: PositiveInt = 1
    ppo_mini_batch_size: PositiveInt | None = None
    """Groups, or episodes, of one optimizer step; None takes one step for the whole batch. Each step's loss is normalised over its
    own mini-batch."""
    mini_batch_unit: Literal["group", "episode"] = "group"
    """What `ppo_mini_batch_size` counts. Mini-batches of episodes are dealt, so that siblings are in different ones."""
    ppo_max_token_len_per_gpu: PositiveInt = 16384
    """Tokens of one micro-batch on one rank."""
    attention: Literal["auto", "flash", "sdpa", "unpacked"] = "auto"
    """How sequences are kept apart in a micro-batch. flash: flash-attn's kernel, on GPUs in bfloat16. sdpa: torch's, sequence by
    sequence. unpacked: the model runs on each sequence alone, for models with layers other than attention. auto: flash or sdpa."""
    float32_head: bool = False
    """Multiply by the output layer in float32, as an engine started with --enable-fp32-lm-head does."""
    lora: LoraSection | None = None
    """Train adapters and freeze the model; None trains every weight."""
    max_logprob_mismatch: PositiveFloat = 0.5
    """Refuse to train when the mean |trainer - engine| log-probability of the first batch exceeds this."""
    max_skipped_updates: PositiveInt = 3
    """Training stops when so many updates in a row have a loss or gradient that is not finite. Such a step is skipped, its groups
    are discarded, and its trajectory ids are in skipped_updates.jsonl."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False
    deepspeed: dict[str, Any] | str = {}
    """DeepSpeed's own settings, inline or the path of its JSON; passed through."""
    generation_timeout_s: PositiveFloat = 1800.0
    """Longest wait for one batch before training stops with the reason."""
    trackers: tuple[Literal["console", "jsonl", "prometheus", "tensorboard", "wandb", "trackio"], ...] = ("console", "jsonl")
    """Who is told every update. jsonl is metrics.jsonl, which `headrace demo` and the benchmarks read."""
    prometheus_host: str = "127.0.0.1"
    prometheus_port: Port = 8802
    """Where the tracker `prometheus` answers GET /metrics."""
    tracker_project: str = "headrace"
    """Of W&B and Trackio; the run's name there is run.id."""
    weight_push: WeightPushSection = WeightPushSection()
    checkpoint: CheckpointSection = CheckpointSection()
    evaluation: EvaluationSection = EvaluationSection()

    def __post_init__(self) -> None:
        check_variant(self.pg_variant)
        check_single_correction(self.pg_variant, self.correction)
        if (self.loss_agg_mode == "seq-mean-token-sum-norm") != (self.loss_norm_tokens is not None):
            raise ValueError(
                "loss_norm_tokens must be given with loss_agg_mode 'seq-mean-token-sum-norm' and with no other, got "
                f"{self.loss_norm_tokens} with {self.loss_agg_mode!r}"
            )


class UpSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `headrace up` starts besides the engines, and starts again. Elsewhere Compose, Kubernetes or systemd decides."""

    agent_processes: PositiveInt = 1
    """The first is at env_agents.port; the ports of the others are chosen."""
    max_restarts: NonNegativeInt = 10
    """A process that ends unasked is started again, at most so many times within `restart_window_s`; one more ends the run. 0: the
    first one does. A process that never worked is not started again."""
    restart_window_s: PositiveFloat = 600.0


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A whole run file."""

    run: RunSection
    rollout: RolloutSection = RolloutSection()
    redis: RedisSection = RedisSection()
    engines: EnginesSection = EnginesSection()
    inference_hub: InferenceHubSection = InferenceHubSection()
    env_agents: EnvAgentsSection = EnvAgentsSection()
    up: UpSection = UpSection()
    trainer: TrainerSection

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.env_agents.environments]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"environment names must differ, got {', '.join(sorted(repeated))} more than once")
        self._check_advantages()
        if self.rollout.min_group_size > self.rollout.num_return_sequences_in_group:
            raise ValueError(
                "rollout.min_group_size must be <= rollout.num_return_sequences_in_group="
                f"{self.rollout.num_return_sequences_in_group}, got {self.rollout.min_group_size}; no group has more episodes"
            )
        if not math.isfinite(self.rollout.async_generation_ratio):
            raise ValueError(
                f"rollout.async_generation_ratio must be a finite number >= 0, got {self.rollout.async_generation_ratio}; "
                "it bounds the stream"
            )
        push = self.trainer.weight_push
        if (push.transport == "disk") != (push.directory is not None):
            raise ValueError(
                "trainer.weight_push.directory must be given with transport: disk and only then, got "
                f"{push.directory!r} with transport: {push.transport}; give a folder that trainer and engines share"
            )

    def _check_advantages(self) -> None:
        trainer = self.trainer
        advantage_settings.check(trainer.adv_estimator, trainer.advantage, trainer.critic, has_reward_kl=trainer.kl.is_in_reward)
        if trainer.adv_estimator in advantage_settings.GROUP_ESTIMATORS:
            for name in ("num_return_sequences_in_group", "min_group_size"):
                if getattr(self.rollout, name) < 2:
                    raise ValueError(
                        f"rollout.{name} must be >= 2 with the group-relative estimator {trainer.adv_estimator!r}, got "
                        f"{getattr(self.rollout, name)}; raise it, or set trainer.adv_estimator to one that compares no siblings"
                    )
        if trainer.critic and trainer.critic.warmup_updates >= trainer.num_updates:
            raise ValueError(
                f"trainer.critic.warmup_updates must be < trainer.num_updates={trainer.num_updates}, got "
                f"{trainer.critic.warmup_updates}; the policy would never be trained"
            )


def load(path: Path, *, overrides: Iterable[str] = (), environment_variables: Mapping[str, str] = os.environ) -> Configuration:
    """The run file at `path`, for a process that uses the model: as `read`, and the model's directory is there.

    Raises: ConfigurationError, a sentence with key, rule, value and remedy.
    """
    configuration = read(path, overrides=overrides, environment_variables=environment_variables)
    model_path = Path(configuration.run.model_path)
    if not (model_path / "config.json").is_file():
        raise ConfigurationError(
            f"{path}: run.model_path must be a directory with a Hugging Face model, got {str(model_path)!r} without "
            "config.json; make the demo's with `make demo`, or give the directory of a downloaded model"
        )
    return configuration


def read(path: Path, *, overrides: Iterable[str] = (), environment_variables: Mapping[str, str] = os.environ) -> Configuration:
    """The run file at `path`, with addresses from the environment and then `overrides` applied.

    Raises: ConfigurationError, a sentence with key, rule, value and remedy.
    """
    raw = strict_yaml.load_yaml(path)
    for variable, dotted in ADDRESS_VARIABLES.items():
        if value := environment_variables.get(variable):
            strict_yaml.set_by_path(raw, dotted, value)
    strict_yaml.apply_overrides(raw, overrides)
    return strict_yaml.decode(raw, Configuration, source=str(path))


def without_secrets(configuration: Configuration) -> Configuration:
    """The configuration without a password in `redis.url`."""
    section = msgspec.structs.replace(configuration.redis, url=redis_address.without_password(configuration.redis.url))
    return msgspec.structs.replace(configuration, redis=section)


def dump(configuration: Configuration) -> str:
    """The configuration as YAML that `load` reads back, but for a password in `redis.url`: files have none."""
    return msgspec.yaml.encode(without_secrets(configuration)).decode()
