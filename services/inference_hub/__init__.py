"""The InferenceHub: one address in front of all inference engines, where weight updates, deaths and aborts are only a delay.

Owns the registry of engines, which weights are in force, routing, and the exchange that loads new weights. Reads and writes the
Redis keys `engines` and `weights`; reaches engines over SGLang's HTTP API. A call's life: `caller_connection` reads it, `gate`
holds it while no engine may generate, `dispatcher` gives it a place in an engine, `resume` decides after every answer whether the
call is done, and `answer` joins partial answers. `control` is the REST surface, `weight_updates` what the trainer talks to,
`probes` what finds out that an engine died.
"""
