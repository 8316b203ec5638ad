"""When data is too far from the policy that learns from it, the run is synchronous for some updates."""


def synchronous_until(until: int, *, version: int, kl_behaviour: float, threshold: float | None, num_updates: int) -> int:
    """The version before which admission behaves as if α were 0.

    Asked after the update that made `version`. A KL over the threshold asks for `num_updates` synchronous updates from there on,
    so that a run that stays over it stays synchronous; otherwise `until` stands, and the run returns to its α by itself.

    Args: kl_behaviour: KL(behaviour ‖ trained) of the update's batch, before its first step. threshold: None never falls back.
    """
    if threshold is None or not kl_behaviour > threshold:
        return until
    return max(until, version + num_updates)
