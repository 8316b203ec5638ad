"""Files of JSON lines, and the console's one line an update."""

import msgspec

from trainer.tracking import ConsoleTracker, JsonLines, UpdateMetrics, summary

METRICS = UpdateMetrics(
    update=3,
    version=3,
    time=0.0,
    reward_mean=0.5,
    success_rate=0.25,
    lag_max=1,
    lag_mean=0.5,
    tokens_by_lag={0: 2000, 1: 1000},
    trajectories_by_lag={0: 64, 1: 64},
    update_s=4.0,
    wait_prev_gen_s=2.0,
    wait_share=0.5,
    trainer_idle_share=0.625,
    engine_idle_share=0.1,
    engine_utilisation=None,
    episode_s_mean=8.0,
    episode_shares={"queued": 0.0, "generating": 1.0, "environment": 0.0, "reward": 0.0},
    assemble_s=0.1,
    train_s=1.5,
    weight_sync_s=0.2,
    weight_gather_s=0.05,
    weight_pause_s=0.063,
    weight_load_s=0.05,
    loss=-0.01,
    clip_fraction=0.02,
    grad_norm=0.7,
    mean_ratio=1.0,
    effective_sample_size=0.99,
    kl_behaviour=0.001,
    kl_behaviour_before=0.001,
    async_generation_ratio=1.0,
    discarded_groups={"stale": 1},
    discarded_tokens={"stale": 300},
    masked_tokens=0,
    unrewarded_tokens=0,
    surplus_episodes=0,
    dead_letters=0,
    logprob_mismatch_max=None,
    logprob_mismatch_mean=None,
    num_groups=16,
    num_trajectories=128,
    num_tokens=9000,
    num_sampled_tokens=3000,
    learning_rate=3e-4,
)


def test_lines_are_appended_and_read_back(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    assert lines.read() == []
    lines.append(METRICS)
    lines.append({"version": 4})
    assert lines.read() == [msgspec.to_builtins(METRICS, str_keys=True), {"version": 4}]


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.append({"version": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"vers')
    resumed = JsonLines(tmp_path / "metrics.jsonl")
    resumed.append({"version": 2})
    assert resumed.read() == [{"version": 1}, {"version": 2}]


def test_console_without_a_terminal_prints_updates_and_notes_only(capsys):
    with ConsoleTracker(num_updates=9) as tracker:
        tracker.waiting(2, ready=1, needed=16)
        tracker.training(2)
        tracker.update(METRICS)
        tracker.note("checkpoint of version 3")
    assert capsys.readouterr().out == summary(METRICS, 9) + "\ncheckpoint of version 3\n"


def test_summary_says_what_one_looks_for():
    text = summary(METRICS, 9)
    assert text.startswith("update 3/9  reward 0.500  success 0.25  lag 1  wait 2.0 s")
    assert "paused 63 ms" in text
