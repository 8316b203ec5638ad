"""What each route of the control plane may refuse: a status, and a sentence as it would be said."""

from collections.abc import Mapping
from typing import Final

Sentences = Mapping[int, str]

_UNKNOWN_ENGINE: Final = {404: "engine 3f1c9a0d5e77 must be registered, and is not; GET /engines lists those that are"}
_UNKNOWN_UPDATE: Final = {404: "weight update 5d0b4c9e is not the current one; start one with POST /weight_updates"}
_STALE_GROUP: Final = {
    409: "weight group headrace-1763-ab12 is not a current one, those are: none; form a new one with POST /weight_groups"
}
_ENGINE_FAILED: Final = {502: "engine http://10.0.0.7:30000 must answer /pause_generation within 300 s, and did not"}
_NO_REDIS: Final = {
    503: "Redis must be reachable to change engines or weights in force, got: Error 111 connecting to redis:6379; try again when "
    "it is"
}

REGISTER_ENGINE: Final[Sentences] = {
    403: "an engine must be at a host that inference_hub.engine_hosts admits (10.0.0.0/8), and this one is at '192.168.0.7'; add "
    "the host there, and restart the hub",
    409: "an engine may be registered once, and engine 3f1c9a0d5e77 is at this address, ready; DELETE /engines/3f1c9a0d5e77 first "
    "to register it anew",
    422: "engine http://10.0.0.7:30000 must be SGLang 0.5.23 (inference_hub.engine_version), got 0.4.0; install that version, or "
    "set inference_hub.engine_version=any to accept every one",
    **_NO_REDIS,
}
REMOVE_ENGINE: Final[Sentences] = {
    **_UNKNOWN_ENGINE,
    409: "engine 3f1c9a0d5e77 takes part in a weight update; try again when the update has ended",
    422: "DELETE /engines/3f1c9a0d5e77: query.force: Input should be a valid boolean, unable to interpret input, got 'maybe'; "
    "/docs shows what it takes",
    **_NO_REDIS,
}
QUARANTINE_ENGINE: Final[Sentences] = {
    **_UNKNOWN_ENGINE,
    409: REMOVE_ENGINE[409],
    422: "POST /engines/3f1c9a0d5e77/quarantine: body.problem: Field required, got {}; /docs shows what it takes",
}
FORM_GROUP: Final[Sentences] = {
    409: "a weight group needs at least one live engine, got none; register one with POST /engines",
    **_NO_REDIS,
    422: "POST /weight_groups: body.backend: Input should be 'gloo' or 'nccl', got 'mpi'; /docs shows what it takes",
}
AWAIT_GROUP: Final[Sentences] = {**_STALE_GROUP, **_ENGINE_FAILED}
BEGIN_UPDATE: Final[Sentences] = {
    **_STALE_GROUP,
    422: "POST /weight_updates: body.version: Input should be greater than or equal to 0, got -1; /docs shows what it takes",
    **_ENGINE_FAILED,
    **_NO_REDIS,
}
LOAD_BUCKET: Final[Sentences] = {
    **_UNKNOWN_UPDATE,
    409: "weight update 5d0b4c9e cannot become loading: it is failed because the trainer abandoned it; start a new one with POST "
    "/weight_updates",
    422: "POST /weight_updates/5d0b4c9e/buckets: body.is_last: Field required, got {'names': ['w']}; /docs shows what it takes",
    **_ENGINE_FAILED,
    **_NO_REDIS,
}
COMMIT_UPDATE: Final[Sentences] = {
    **_UNKNOWN_UPDATE,
    409: "weight update 5d0b4c9e can be committed after its last bucket, and none with is_last was loaded; send the rest of the "
    "weights",
    422: "POST /weight_updates/5d0b4c9e/commit: body.checksums: Input should be a valid dictionary, got 3; /docs shows what "
    "it takes",
    **_ENGINE_FAILED,
    **_NO_REDIS,
}
ABANDON_UPDATE: Final[Sentences] = {
    **_UNKNOWN_UPDATE,
    409: "weight update 5d0b4c9e cannot become failed: it is committed; start a new one with POST /weight_updates",
}
READINESS: Final[Sentences] = {503: "at least one engine must be ready, none is; GET /engines says why"}
