"""A checkpoint of a model of about 250 MB: how long training stands still for it, and how long a new process takes to resume."""

import argparse
import time
from datetime import timedelta
from pathlib import Path

from benchmarks.trainer.channel import Channel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    channel = Channel()

    import torch

    from shared.configuration import TrainerSection
    from trainer.checkpoints import POLICY, Checkpoints, LedgerState
    from trainer.model import build_engine, load_policy, start_ranks

    torch.set_num_threads(1)
    start_ranks(timeout=timedelta(minutes=10))
    trainer = TrainerSection(num_updates=1, dtype="float32")
    policy = load_policy(arguments.model, trainer)
    checkpoints = Checkpoints(arguments.directory, keep=1, fingerprint=policy.fingerprint(), model_path=arguments.model)
    engine = build_engine(policy, trainer)
    if arguments.resume:
        state = checkpoints.newest()
        assert state is not None
        checkpoints.load({POLICY: engine}, state, {})
        channel.answer(version=state.version, cpu_s=time.process_time())
        return
    token_ids = torch.arange(8)[None]
    loss = engine(token_ids, token_ids > 0, torch.ones(1)).sum()
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    started, cpu_started = time.perf_counter(), time.process_time()
    checkpoints.save({POLICY: engine}, 1, [], ledger=LedgerState(0, {}), components={})
    blocked, block_cpu_s = time.perf_counter(), time.process_time() - cpu_started
    saved = checkpoints.wait()
    assert saved is not None
    assert saved.problem is None, saved.problem
    channel.answer(block_s=blocked - started, block_cpu_s=block_cpu_s, durable_s=time.perf_counter() - started)
    checkpoints.close()


if __name__ == "__main__":
    main()
