from services.env_agents.episode_log import EpisodeLog
from services.env_agents.generation import Generation
from services.env_agents.transcript import transcript
from shared.trajectory import Outcome
from shared.versions import VersionSpan


def decode(token_ids):
    return "".join(map(chr, token_ids))


def test_speakers_are_told_apart(identity):
    log = EpisodeLog(identity, temperature=1.0)
    log.add_context([ord("a"), ord("b")])
    log.add_turn(Generation([ord("c")], [0.0], [VersionSpan(0, 1, 0)], is_cut=False), state_fingerprint="")
    log.add_context([ord("d")])
    text = transcript(log.trajectory(Outcome.TRUNCATED, "too long"), decode)
    assert text == "CONTEXT\nab\n\nPOLICY\nc\n\nCONTEXT\nd\n\nTRUNCATED reward 0 too long"


def test_episode_without_tokens_says_why(identity):
    log = EpisodeLog(identity, temperature=1.0)
    assert (
        transcript(log.trajectory(Outcome.TIMEOUT, "reset took longer than 1 s"), decode)
        == "(no tokens: reset took longer than 1 s)"
    )
