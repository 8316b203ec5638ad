"""A half-million-parameter policy, made and warm-started from nothing in about a minute.

Owns the recipe: tokenizer, model, arithmetic tasks and demonstrations. Writes a Hugging Face model directory that also holds
`train.parquet` and `heldout.parquet`; `python -m examples.tiny_policy --help` says how.
"""
