"""The tree that every exception of Headrace hangs on; what only one module raises stands in that module.

HeadraceError
├── ConfigurationError      a run file, flag or environment variable that cannot be used as it is
├── RecordError             bytes that are not a trajectory this version can read
│   └── NewerSchemaError    written by a newer Headrace
├── LedgerError             a transition that the books do not allow
├── EngineError             an engine that is unreachable, of another version, or refuses
├── WeightUpdateError       an update that the engines or the hub did not complete
├── EpisodeError            an environment that raised, hung or answered nonsense: becomes a record, never a crash
├── TrainingError           training cannot go on with the data or the model it was given
└── ProcessError            a process that `headrace up` started ended, or did not get ready

Messages are sentences: the rule, the value that breaks it, and the remedy.
"""


class HeadraceError(Exception):
    """Base of every error that is Headrace's own."""


class ConfigurationError(HeadraceError):
    """A setting that cannot be used as it is; the message names the key, the rule, the value and the remedy."""


class RecordError(HeadraceError):
    """Bytes that are not a trajectory record this version can read."""


class NewerSchemaError(RecordError):
    """A trajectory record written by a newer version of Headrace."""


class LedgerError(HeadraceError):
    """A ledger transition that the books do not allow, such as training a group that is not ready."""


class EngineError(HeadraceError):
    """An inference engine that is unreachable, of another version, or refuses a request."""


class WeightUpdateError(HeadraceError):
    """A weight update that did not complete; engines keep or regain a full, verified set of weights."""


class EpisodeError(HeadraceError):
    """An environment that raised, hung or answered nonsense. The episode ends with an outcome and the run goes on."""


class TrainingError(HeadraceError):
    """Training cannot go on with the data or the model it was given."""


class ProcessError(HeadraceError):
    """A process of the run ended before it should, or did not get ready in time. `last_lines` are what it printed last."""

    def __init__(self, message: str, *, last_lines: list[str]) -> None:
        super().__init__(message)
        self.last_lines = last_lines
