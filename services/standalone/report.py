"""How a demo ended: a table, three transcripts, the learning curve, and one line of JSON for programs."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from services.standalone import printing, run_files
from services.standalone.accounting import Account
from services.standalone.run_files import Evaluation, Lineage, Transcript, Update
from shared.errors import TrainingError


class Summary(msgspec.Struct, frozen=True):
    """The demo's last line. Success is on tasks that training never saw, sampled at temperature 1."""

    success_before: float
    success_after: float
    updates: int
    episodes: int
    """Trained on."""
    minutes: float
    lag_max: int
    weight_pause_ms_p50: float
    wait_prev_gen_s_mean: float
    trajectories_lost: int


class Excerpt(msgspec.Struct, frozen=True):
    """One episode of the demo, for people."""

    title: str
    text: str


def show(console: Console, directory: Path, account: Account, *, minutes: float) -> None:
    """Prints everything and writes learning_curve.png. `minutes` since the demo began.

    Raises: TrainingError if the run left no updates or no evaluations.
    """
    from services.standalone import learning_curve

    updates = run_files.updates(directory)
    sampled, greedy = (run_files.evaluations(directory, greedy=choice) for choice in (False, True))
    if not updates or len(sampled) < 2:
        raise TrainingError(
            f"the demo must leave updates and two evaluations in {directory}, got {len(updates)} and {len(sampled)}; see its logs"
        )
    summary = summarise(updates, sampled, run_files.lineage(directory), lost=account.lost, minutes=minutes)
    picture = directory / "learning_curve.png"
    learning_curve.draw(picture, title=f"Headrace demo, {len(updates)} updates", updates=updates, sampled=sampled, greedy=greedy)
    for excerpt in excerpts(run_files.transcripts(directory)):
        console.print(printing.block(console, excerpt.title, excerpt.text))
    rows = success_rows(sampled, greedy)
    console.print(printing.table(console, ("success on unseen tasks", "before", "after"), rows))
    console.print(f"learning curve: {picture}\neverything else: {directory}", soft_wrap=True)
    printing.as_json(summary)


def summarise(
    updates: Sequence[Update], sampled: Sequence[Evaluation], lineage: Sequence[Lineage], *, lost: int, minutes: float
) -> Summary:
    return Summary(
        success_before=round(sampled[0].success_rate, 4),
        success_after=round(sampled[-1].success_rate, 4),
        updates=len(updates),
        episodes=sum(update.num_trajectories for update in updates),
        minutes=round(minutes, 2),
        lag_max=max(line.lag_max for line in lineage),
        weight_pause_ms_p50=round(1000 * statistics.median(update.weight_pause_s for update in updates), 1),
        wait_prev_gen_s_mean=round(statistics.fmean(update.wait_prev_gen_s for update in updates), 3),
        trajectories_lost=lost,
    )


def success_rows(sampled: Sequence[Evaluation], greedy: Sequence[Evaluation]) -> list[tuple[str, str, str]]:
    """Before and after, on tasks that training never saw."""
    return [
        (label, f"{evaluations[0].success_rate:.1%}", f"{evaluations[-1].success_rate:.1%}")
        for label, evaluations in (("sampled at temperature 1", sampled), ("greedy", greedy))
        if evaluations
    ]


def excerpts(by_version: Mapping[int, Sequence[Transcript]]) -> list[Excerpt]:
    """One held-out task before, in the middle of and after training; one that was learnt, if there is one."""
    versions = sorted(version for version, found in by_version.items() if found)
    if not versions:
        return []
    chosen = (("before", versions[0]), ("middle", versions[len(versions) // 2]), ("after", versions[-1]))
    num_tasks = min(len(by_version[version]) for _, version in chosen)
    before, after = by_version[versions[0]], by_version[versions[-1]]
    index = max(range(num_tasks), key=lambda i: after[i].reward - before[i].reward)
    shown = [by_version[version][index] for _, version in chosen]
    texts = [shown[0].text, *(without_shared_start(transcript.text, shown[0].text) for transcript in shown[1:])]
    return [
        Excerpt(f"{label} (version {version}) · task {transcript.task} · reward {transcript.reward:g}", text)
        for (label, version), transcript, text in zip(chosen, shown, texts, strict=True)
    ]


def without_shared_start(text: str, first: str) -> str:
    """`text` from the first paragraph that differs from `first`: the same task begins with the same page of instructions."""
    paragraphs, first_paragraphs = text.split("\n\n"), first.split("\n\n")
    pairs = enumerate(zip(paragraphs, first_paragraphs, strict=False))
    num_shared = next((index for index, (ours, theirs) in pairs if ours != theirs), 0)
    return "\n\n".join(["… as above", *paragraphs[num_shared:]]) if num_shared else text
