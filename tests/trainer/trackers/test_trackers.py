"""Each tracker writes what its own reader finds; one that fails or hangs is counted, and training does not notice."""

import json
import struct
import sys
import threading
import urllib.error
import urllib.request

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.configuration import Configuration, RunSection
from shared.errors import ConfigurationError
from shared.evaluation import EpisodeStatistics
from shared.trajectory import Outcome
from tests.trainer.learning import section
from tests.trainer.metrics import METRICS
from trainer.trackers.guarded import MAX_WAITING, BackgroundTracker, GuardedTracker
from trainer.trackers.prometheus import PrometheusTracker
from trainer.trackers.scalars import evaluation_scalars, update_scalars
from trainer.trackers.trackers import open_trackers, require_packages
from trainer.tracking import Evaluation

LOG_BLOCK_BYTES, LOG_FULL, LOG_LAST = 32768, 1, 4
EVALUATION = Evaluation(
    version=3, greedy=True, results={"calculator": EpisodeStatistics(4, 0.75, None, {Outcome.COMPLETED: 4})}, time=0.0
)


def configuration(tmp_path, *trackers) -> Configuration:
    return Configuration(
        run=RunSection(id="run-7", directory=str(tmp_path), model_path="model"), trainer=section(trackers=trackers)
    )


def tell(configuration, *, version=0):
    with open_trackers(configuration, version=version) as trackers:
        trackers.update(METRICS)
        trackers.evaluation(EVALUATION)
    return trackers


def test_scalars_are_the_numbers_by_flat_names():
    scalars = update_scalars(METRICS)
    assert scalars["train/loss"] == -0.01
    assert scalars["train/discarded_groups/stale"] == 1.0
    assert "train/logprob_mismatch_max" not in scalars, "there was none"
    assert evaluation_scalars(EVALUATION) == {
        "evaluation/calculator/greedy/episodes": 4.0,
        "evaluation/calculator/greedy/success_rate": 0.75,
        "evaluation/calculator/greedy/outcomes/completed": 4.0,
    }


def test_jsonl_is_the_whole_update(tmp_path):
    assert tell(configuration(tmp_path, "jsonl")).failures == 0
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        msgspec.to_builtins(METRICS, str_keys=True)
    ]


def test_prometheus_scrapes_every_scalar_until_the_run_ends():
    tracker = PrometheusTracker(host="127.0.0.1", port=0)
    tracker.update(METRICS)
    tracker.evaluation(EVALUATION)
    url = f"http://127.0.0.1:{tracker.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    scraped = {sample.labels["metric"]: sample.value for sample in families["headrace_trainer"].samples}
    assert scraped == pytest.approx({**update_scalars(METRICS), **evaluation_scalars(EVALUATION)})
    assert families["headrace_trainer_version"].samples[0].value == METRICS.version
    tracker.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_tensorboards_own_reader_finds_every_scalar_at_its_version(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert tell(configuration(tmp_path, "tensorboard")).failures == 0
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    expected = {**update_scalars(METRICS), **evaluation_scalars(EVALUATION)}
    assert set(events.Tags()["scalars"]) == set(expected)
    for name, value in expected.items():
        (event,) = events.Scalars(name)
        assert (event.step, event.value) == (3, pytest.approx(value))


def test_tensorboard_hides_what_a_lineage_that_was_cut_off_wrote(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tell(configuration(tmp_path, "tensorboard"))
    with open_trackers(configuration(tmp_path, "tensorboard"), version=1) as trackers:
        trackers.update(msgspec.structs.replace(METRICS, version=2, loss=5.0))
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(2, 5.0)]


def log_records(data: bytes):
    """The records of a file in LevelDB's log format, as wandb writes it after a header of its own."""
    position, parts = 7, []
    while position < len(data):
        if LOG_BLOCK_BYTES - position % LOG_BLOCK_BYTES < 7:
            position += LOG_BLOCK_BYTES - position % LOG_BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (LOG_FULL, LOG_LAST):
            yield b"".join(parts)
            parts = []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_offline_holds_every_number(tmp_path, monkeypatch):
    wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert tell(configuration(tmp_path, "wandb")).failures == 0
    (path,) = tmp_path.glob("wandb/offline-run-*/run-run-7.wandb")
    found = {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        for item in record.history.item:
            found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    expected = {**update_scalars(METRICS), **evaluation_scalars(EVALUATION), "version": 3}
    assert expected.items() <= found.items()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_trackio_holds_every_number(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio_storage = pytest.importorskip("trackio.sqlite_storage")
    assert tell(configuration(tmp_path, "trackio")).failures == 0
    logged = trackio_storage.SQLiteStorage.get_logs("headrace", "run-7")
    found = {name: value for line in logged for name, value in line.items()}
    assert {**update_scalars(METRICS), **evaluation_scalars(EVALUATION)}.items() <= found.items()
    assert {line["step"] for line in logged} == {3}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=f"trainer.trackers has '{name}'.*run `pip install {name}`"):
        require_packages(["console", name])


class Failing:
    def update(self, metrics):
        raise ConnectionError("no route to host")

    evaluation = update

    def close(self):
        raise ConnectionError("still none")


@pytest.mark.parametrize("kind", [GuardedTracker, BackgroundTracker])
def test_a_tracker_that_fails_is_counted_and_said_once(kind):
    notices = []
    tracker = kind("far", Failing, notice=notices.append)
    tracker.update(METRICS)
    tracker.evaluation(EVALUATION)
    tracker.close()
    assert tracker.failures == 3
    (notice,) = notices
    assert notice.startswith("trainer.trackers: far failed, and training goes on without it: ConnectionError: no route to host")


def test_a_tracker_that_hangs_holds_nobody_up_and_what_it_misses_is_counted():
    may_go_on = threading.Event()

    def hang():
        may_go_on.wait(60)
        raise TimeoutError

    notices = []
    tracker = BackgroundTracker("slow", hang, notice=notices.append)
    for _ in range(MAX_WAITING + 5):
        tracker.update(METRICS)
    assert tracker.failures in (4, 5), "one of them may be under way"
    assert "slower than training" in notices[0]
    may_go_on.set()
    tracker.close()


def test_a_tracker_that_does_not_end_is_left_behind_in_words(monkeypatch):
    monkeypatch.setattr("trainer.trackers.guarded.CLOSE_TIMEOUT_S", 0.01)
    may_end = threading.Event()
    notices = []
    tracker = BackgroundTracker("slow", lambda: may_end.wait(60), notice=notices.append)
    tracker.update(METRICS)
    tracker.close()
    assert "it did not end within 0.01 s" in notices[0]
    may_end.set()


def test_a_full_disk_is_a_failure_of_the_tracker_alone(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").mkdir()
    assert tell(configuration(tmp_path, "console", "jsonl")).failures == 2
    assert "jsonl failed, and training goes on without it: IsADirectoryError" in capsys.readouterr().out


def test_unknown_trackers_are_refused():
    with pytest.raises(msgspec.ValidationError, match="mlflow"):
        section(trackers=["mlflow"])


def test_console_is_silent_unless_chosen(tmp_path, capsys):
    tell(configuration(tmp_path, "jsonl"))
    assert capsys.readouterr().out == ""
    tell(configuration(tmp_path, "console"))
    assert capsys.readouterr().out.startswith("update 3/1")
